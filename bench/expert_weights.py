"""Weights of a rank's experts for benchmarks: drawn as a checkpoint has them, repacked for each contender."""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_specs.nvfp4_grouped_gemm_partial.layout import repack_down
from kernel_specs.nvfp4_grouped_gemm_swiglu.drawing import dequantize
from kernel_specs.nvfp4_grouped_gemm_swiglu.layout import repack_gate_up

BLOCK = 16
AT_ONCE = 32  # experts that are repacked together
# powers of two, so that the other contenders' inputs are exact in BF16
INPUT_SCALE = 2.0**-4
FIRST_SCALE = 2.0**-8
INNER_SCALE = 2.0**-3
SECOND_SCALE = 2.0**-8
ONE = 7 << 3  # E4M3


@dataclass(frozen=True, slots=True)
class Nvfp4Experts:
    """`plain` as a checkpoint has it: w13, w13_scale, w13_scale_2, w2, ...; the rest as our kernels read it."""

    plain: dict[str, Tensor]
    first: Tensor
    first_scales: Tensor
    second: Tensor
    second_scales: Tensor
    gate_up_scales: Tensor
    global_scale: Tensor
    down_scales: Tensor

    @staticmethod
    def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
        return dequantize(codes, scales)

    def rows(self, expert: int, hidden: Tensor) -> Tensor:
        """The expert's output rows for rows of `hidden`, in float64, h not rounded."""
        w13 = dequantize(self.plain["w13"][expert], self.plain["w13_scale"][expert].view(torch.uint8)) * FIRST_SCALE
        w2 = dequantize(self.plain["w2"][expert], self.plain["w2_scale"][expert].view(torch.uint8)) * SECOND_SCALE
        gate, up = (hidden @ w13.t()).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ w2.t()


def draw_nvfp4(rows: tuple[int, ...], columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random codes [*rows, columns / 2] and positive E4M3 scales between 1 and 4 [*rows, columns / 16], uint8."""
    device = generator.device
    codes = torch.randint(0, 256, (*rows, columns // 2), generator=generator, device=device, dtype=torch.uint8)
    scales = torch.randint(ONE, ONE + 16, (*rows, columns // BLOCK), generator=generator, device=device)
    return codes, scales.to(torch.uint8)


@functools.lru_cache(maxsize=1)
def nvfp4_experts(num_experts: int, hidden: int, width: int, generator: torch.Generator) -> Nvfp4Experts:
    device = generator.device
    w13, w13_scale = draw_nvfp4((num_experts, 2 * width), hidden, generator)
    w2, w2_scale = draw_nvfp4((num_experts, hidden), width, generator)
    pieces = [
        (
            repack_gate_up(w13[i : i + AT_ONCE], w13_scale[i : i + AT_ONCE]),
            repack_down(w2[i : i + AT_ONCE], w2_scale[i : i + AT_ONCE]),
        )
        for i in range(0, num_experts, AT_ONCE)
    ]
    first, second = zip(*pieces, strict=True)

    def each(value: float, *more: int) -> Tensor:
        return torch.full((num_experts, *more), value, device=device)

    return Nvfp4Experts(
        plain={
            "w13": w13,
            "w13_scale": w13_scale.view(torch.float8_e4m3fn),
            "w13_scale_2": each(FIRST_SCALE),
            "w2": w2,
            "w2_scale": w2_scale.view(torch.float8_e4m3fn),
            "w2_scale_2": each(SECOND_SCALE),
        },
        first=torch.cat([codes for codes, _ in first]),
        first_scales=torch.cat([scales for _, scales in first]),
        second=torch.cat([codes for codes, _ in second]),
        second_scales=torch.cat([scales for _, scales in second]),
        gate_up_scales=each(INPUT_SCALE * FIRST_SCALE, 2),
        global_scale=torch.full((1,), 1 / INNER_SCALE, device=device),
        down_scales=each(INNER_SCALE * SECOND_SCALE),
    )


@functools.lru_cache(maxsize=1)
def bf16_experts(num_experts: int, hidden: int, width: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """w13 [experts, 2 width, hidden] and w2 [experts, hidden, width] that keep sums near 1."""
    made = []
    for shape in ((num_experts, 2 * width, hidden), (num_experts, hidden, width)):
        weight = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
        made.append(weight.normal_(0, shape[2] ** -0.5, generator=generator))
    return made[0], made[1]
