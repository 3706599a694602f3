"""What `bf16_grouped_gemm_swiglu` computes: products and silu(gate) * up in float64, rounded once to BF16."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.bf16_grouped_gemm_swiglu.schedules import Schedule, draw, draw_rows, draw_weight, local_routes


def bf16_grouped_gemm_swiglu(
    activation: Tensor,
    weight: Tensor,
    expert_ids: Tensor,
    route_offsets: Tensor,
    routes: Tensor,
    h: Tensor,
    first_expert: int,
    **_: int,
) -> None:
    """Write h [num_tokens, k, intermediate_width] for the routes to experts held here; leave the others."""
    k = routes.shape[1]
    schedule = Schedule(expert_ids, route_offsets, routes, first_expert)
    for expert, of_expert in schedule.local(weight.shape[0]):
        gate, up = (activation[of_expert // k].double() @ weight[expert].double().T).chunk(2, dim=-1)
        h[of_expert // k, of_expert % k] = (gate * torch.sigmoid(gate) * up).to(h.dtype)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | int]:
    """A schedule; NaN in tokens and experts that no route held here meets."""
    schedule = draw(axes, generator)
    used = local_routes(schedule, axes["num_local_experts"]) // axes["num_experts_per_tok"]
    shape = (axes["num_local_experts"], axes["gate_up_rows"], axes["moe_hidden_size"])
    return {
        **schedule.arguments(),
        "activation": draw_rows((axes["num_tokens"], axes["moe_hidden_size"]), used, generator),
        "weight": draw_weight(shape, schedule, generator),
    }
