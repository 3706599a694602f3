"""What `bf16_grouped_gemm_partial` computes: products in float64, rounded once to the rows' dtype."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.bf16_grouped_gemm_swiglu.schedules import Schedule, draw, draw_rows, draw_weight, local_routes


def bf16_grouped_gemm_partial(
    h: Tensor,
    weight: Tensor,
    expert_ids: Tensor,
    route_offsets: Tensor,
    routes: Tensor,
    rows: Tensor,
    first_expert: int,
    **_: int,
) -> None:
    """Write rows [num_tokens, k, moe_hidden_size] for the routes to experts held here; leave the others."""
    k = routes.shape[1]
    schedule = Schedule(expert_ids, route_offsets, routes, first_expert)
    for expert, of_expert in schedule.local(weight.shape[0]):
        product = h[of_expert // k, of_expert % k].double() @ weight[expert].double().T
        rows[of_expert // k, of_expert % k] = product.to(rows.dtype)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | int]:
    """A schedule; NaN in the rows of h and in experts that no route held here meets."""
    schedule = draw(axes, generator)
    num_tokens, k, width = axes["num_tokens"], axes["num_experts_per_tok"], axes["intermediate_width"]
    used = local_routes(schedule, axes["num_local_experts"])
    shape = (axes["num_local_experts"], axes["moe_hidden_size"], width)
    return {
        **schedule.arguments(),
        "h": draw_rows((num_tokens * k, width), used, generator).view(num_tokens, k, width),
        "weight": draw_weight(shape, schedule, generator),
    }
