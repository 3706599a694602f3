"""What `nvfp4_grouped_gemm_partial` computes, in float64, rounded once."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.nvfp4_grouped_gemm_partial.layout import repack_down, unpack_down
from kernel_specs.nvfp4_grouped_gemm_swiglu import drawing


def nvfp4_grouped_gemm_partial(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, *rest: Any, **_: Any
) -> None:
    """`rest` goes on in the spec's order. Writes the rows whose routes a local expert has."""
    down_scales, expert_ids, route_offsets, routes, rows, first_expert = rest
    columns = codes.shape[2] * 2
    values, out = drawing.dequantize(codes, scales).flatten(0, 1), rows.flatten(0, 1)
    for expert, found in drawing.local_routes(expert_ids, route_offsets, routes, first_expert, weight.shape[0]):
        plain = unpack_down(weight[expert : expert + 1], weight_scales[expert : expert + 1], columns)
        product = values[found] @ drawing.dequantize(*plain)[0].T
        out[found] = (product * down_scales[expert].double()).to(rows.dtype)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | int]:
    """NVFP4 operands whose sums FP32 holds exactly; experts without routes and rows that nobody reads are NaN."""
    device = generator.device
    hidden, width = axes["moe_hidden_size"], axes["packed_width"] * 2
    experts, k = axes["num_local_experts"], axes["num_experts_per_tok"]
    schedule = drawing.draw_schedule(axes, generator)
    weight, weight_scales = drawing.draw_matrix((experts, hidden), width, generator)
    codes, scales = drawing.draw_matrix((axes["num_tokens"] * k,), width, generator)
    factors = (0.5 + torch.rand(experts, generator=generator, device=device)) / (32 * width**0.5)
    drawing.spoil_unused(schedule, weight, weight_scales, factors)
    read = torch.zeros(axes["num_tokens"] * k, dtype=torch.bool, device=device)
    for _, found in drawing.local_routes(*drawing.in_order(schedule), experts):
        read[found] = True
    scales[~read] = drawing.NAN_SCALE
    packed, packed_scales = repack_down(weight, weight_scales)
    return {
        "codes": codes.view(axes["num_tokens"], k, -1),
        "scales": scales.view(axes["num_tokens"], k, -1),
        "weight": packed,
        "weight_scales": packed_scales,
        "down_scales": factors,
        **schedule,
    }
