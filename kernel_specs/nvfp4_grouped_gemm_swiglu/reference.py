"""What `nvfp4_grouped_gemm_swiglu` computes, in float64 up to h, then the documented FP32 operations."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.nvfp4_grouped_gemm_swiglu import drawing
from kernel_specs.nvfp4_grouped_gemm_swiglu.layout import repack_gate_up, unpack_gate_up
from kernel_specs.rmsnorm_nvfp4_quantize.reference import BLOCK, MAX_E4M3, _code

LOWEST_GATE = -87.0
# FP32 loses several times less behind exact sums. Where h is this close to a tie, its code would be a matter of luck.
CLEAR = 8e-6
ROUNDS = 200


def nvfp4_grouped_gemm_swiglu(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, *rest: Any, **_: int
) -> None:
    """`rest` goes on in the spec's order. Writes the output rows whose routes a local expert has."""
    gate_up_scales, global_scale, expert_ids, route_offsets, routes, out_codes, out_scales, first_expert = rest
    columns = codes.shape[1] * 2
    rows = drawing.dequantize(codes, scales)
    k = routes.shape[1]
    for expert, found in drawing.local_routes(expert_ids, route_offsets, routes, first_expert, weight.shape[0]):
        plain = unpack_gate_up(weight[expert : expert + 1], weight_scales[expert : expert + 1], columns)
        hidden = _swiglu(rows[found // k], drawing.dequantize(*plain)[0], gate_up_scales[expert])
        bytes_of_codes, bytes_of_scales = _quantize(hidden.float(), global_scale)
        out_codes.flatten(0, 1)[found] = bytes_of_codes
        out_scales.flatten(0, 1)[found] = bytes_of_scales


def _swiglu(rows: Tensor, weights: Tensor, scales: Tensor) -> Tensor:
    """The h [routes, outputs] of one expert, in float64."""
    gate, up = (rows @ weights.T).chunk(2, dim=-1)
    gate, up = gate * scales[0].double(), up * scales[1].double()
    return gate * torch.sigmoid(gate.clamp(min=LOWEST_GATE)) * up


def _quantize(hidden: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 h [routes, outputs] as bytes of codes and of scales."""
    blocks = hidden.unflatten(-1, (-1, BLOCK))
    block_scales, factors = _scales_of(blocks, global_scale, 1.0)
    nibbles = _code(blocks * factors[..., None]).flatten(-2)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), block_scales.view(torch.uint8)


def _scales_of(blocks: Tensor, global_scale: Tensor, change: float) -> tuple[Tensor, Tensor]:
    """E4M3 scales of blocks with largest values `change` times as large, and what the values are multiplied by."""
    amax = blocks.abs().amax(dim=-1) * change
    sixth = torch.tensor(1 / 6, dtype=torch.float32, device=blocks.device)
    scales = (global_scale * (amax * sixth)).clamp(max=MAX_E4M3).to(torch.float8_e4m3fn)
    widened = scales.float()
    factors = torch.where(widened == 0, 0.0, (widened * global_scale.reciprocal()).reciprocal())
    return scales, factors


def _unclear(hidden: Tensor, global_scale: Tensor) -> Tensor:
    """Rows of h with a code or a scale that a small change would change."""
    blocks = hidden.float().unflatten(-1, (-1, BLOCK))
    _, factors = _scales_of(blocks, global_scale, 1.0)
    quotients = blocks * factors[..., None]
    less, more = ((1 - CLEAR), (1 + CLEAR))
    codes_differ = (_code(quotients * less) != _code(quotients * more)).flatten(1).any(dim=1)
    smaller, larger = (_scales_of(blocks, global_scale, change)[0].view(torch.uint8) for change in (less, more))
    return codes_differ | (smaller != larger).any(dim=1)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | int]:
    """NVFP4 operands whose sums FP32 holds exactly, and a schedule; tokens with an unclear h are drawn anew.

    Sometimes the global scale is so large or small that scales saturate or vanish. Experts without routes are NaN.
    """
    device = generator.device
    hidden, width = axes["moe_hidden_size"], axes["packed_width"] * 2
    experts = axes["num_local_experts"]
    schedule = drawing.draw_schedule(axes, generator)
    weight, weight_scales = drawing.draw_matrix((experts, 2 * width), hidden, generator)
    scales = (0.5 + torch.rand((experts, 2), generator=generator, device=device)) / (16 * hidden**0.5)
    power = torch.randint(-8, 10, (1,), generator=generator, device=device)
    plain = torch.rand(1, generator=generator, device=device) < 0.6
    global_scale = (1.37 * 2.0 ** torch.where(plain, 3, power)).float()
    codes, code_scales = _clear_tokens((weight, weight_scales, scales, global_scale), schedule, axes, generator)
    drawing.spoil_unused(schedule, weight, weight_scales, scales)
    packed, packed_scales = repack_gate_up(weight, weight_scales)
    return {
        "codes": codes,
        "scales": code_scales,
        "weight": packed,
        "weight_scales": packed_scales,
        "gate_up_scales": scales,
        "global_scale": global_scale,
        **schedule,
    }


def _clear_tokens(
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    schedule: drawing.Schedule,
    axes: Mapping[str, int],
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Activations with no unclear h."""
    tokens, hidden = axes["num_tokens"], axes["moe_hidden_size"]
    weight, weight_scales, scales, global_scale = weights
    dequantized = {
        expert: (drawing.dequantize(weight[expert], weight_scales[expert]), found)
        for expert, found in drawing.local_routes(*drawing.in_order(schedule), axes["num_local_experts"])
    }
    codes, code_scales = drawing.draw_matrix((tokens,), hidden, generator)
    for _ in range(ROUNDS):
        rows = drawing.dequantize(codes, code_scales)
        unclear = torch.zeros(tokens, dtype=torch.bool, device=generator.device)
        for expert, (matrix, found) in dequantized.items():
            token = found // axes["num_experts_per_tok"]
            bad = _unclear(_swiglu(rows[token], matrix, scales[expert]), global_scale)
            unclear[token[bad]] = True
        if not bool(unclear.any()):
            return codes, code_scales
        fresh = drawing.draw_matrix((tokens,), hidden, generator)
        codes = torch.where(unclear[:, None], fresh[0], codes)
        code_scales = torch.where(unclear[:, None], fresh[1], code_scales)
    raise AssertionError("no clear activations found")
