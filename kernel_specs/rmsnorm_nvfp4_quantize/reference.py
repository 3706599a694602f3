"""What `rmsnorm_nvfp4_quantize` computes: the norm in float64, rounded once, then the documented FP32 operations."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives.rows_reference import repeated, rms_normed

BLOCK = 16
MAX_E4M3 = 448.0
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbours of E2M1; every second one rounds up
EPS = 1e-5
# FP32 norms differ by a few of its ulp. Where a value is that close to the middle between two BF16 numbers, its
# rounding would be a matter of luck, and so would the bytes. In BF16 ulp:
CLEAR = 2e-4
ROUNDS = 1000
ROW_SCALES = (1.0, 30.0, 1e-3, 0.0, 1e4, 1.0, 1e-12, 1.0)


def rmsnorm_nvfp4_quantize(
    x: Tensor, weight: Tensor, global_scale: Tensor, codes: Tensor, scales: Tensor, eps: float, **_: int
) -> None:
    """Writes `codes` and `scales`."""
    normed = _norm(x, weight, eps).bfloat16().float()
    blocks = normed.unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(dim=-1)
    sixth = torch.tensor(1 / 6, dtype=torch.float32, device=x.device)
    block_scales = (global_scale * (amax * sixth)).clamp(max=MAX_E4M3).to(torch.float8_e4m3fn)
    scales.copy_(block_scales.view(torch.uint8))
    widened = block_scales.float()
    factors = torch.where(widened == 0, 0.0, (widened * global_scale.reciprocal()).reciprocal())
    nibbles = _code(blocks * factors[..., None]).flatten(-2)
    codes.copy_(nibbles[..., 0::2] | (nibbles[..., 1::2] << 4))


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_normed(x.double(), eps) * (weight.double() + 1.0)


def _code(values: Tensor) -> Tensor:
    """E2M1's code of the nearest number: how many midpoints lie below, where a tie counts if the code is then even."""
    size = values.abs()
    code = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for number, midpoint in enumerate(MIDPOINTS):
        code += size >= midpoint if number % 2 else size > midpoint
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Rows of very different size, some with blocks that all but vanish, whose norms round clearly.

    The global scale is a power of two half of the time, so that quotients fall on ties; and it is sometimes so large
    or small that scales saturate or vanish.
    """
    weight = random_weight(axes["hidden_size"], generator)
    x = clear_rows(axes["num_tokens"], weight, generator)
    return {"x": x, "weight": weight, "global_scale": random_global_scale(generator), "eps": EPS}


def random_weight(hidden_size: int, generator: torch.Generator) -> Tensor:
    return (0.2 * torch.randn(hidden_size, generator=generator, device=generator.device)).bfloat16()


def random_global_scale(generator: torch.Generator) -> Tensor:
    device = generator.device
    powers = 2.0 ** torch.randint(-8, 13, (1,), generator=generator, device=device)
    factor = torch.where(torch.rand(1, generator=generator, device=device) < 0.5, 1.0, 1.37)
    return (powers * factor).float()


def clear_rows(num_tokens: int, weight: Tensor, generator: torch.Generator) -> Tensor:
    """Rows whose norms under `weight` round clearly."""
    x = _draw(num_tokens, len(weight), generator)
    for _ in range(ROUNDS):
        unclear = _unclear(x, weight)
        if not bool(unclear.any()):
            return x
        x = torch.where(unclear[:, None], _draw(num_tokens, len(weight), generator), x)
    raise AssertionError("no clear norms found")


def _draw(num_tokens: int, hidden_size: int, generator: torch.Generator) -> Tensor:
    device = generator.device
    scales = repeated(ROW_SCALES, num_tokens, device)[:, None]
    x = torch.randn((num_tokens, hidden_size), generator=generator, device=device)
    blocks = torch.randint(-12, 1, (num_tokens, hidden_size // BLOCK), generator=generator, device=device)
    sizes = torch.where(torch.rand(blocks.shape, generator=generator, device=device) < 0.3, 2.0**blocks, 1.0)
    return (x * scales * sizes.repeat_interleave(BLOCK, dim=1)).bfloat16()


def _unclear(x: Tensor, weight: Tensor) -> Tensor:
    """Rows in which some norm lies next to the middle between two BF16 numbers."""
    exact = _norm(x, weight, EPS)
    _, exponent = torch.frexp(exact)
    ulps = torch.ldexp(exact, 8 - exponent)  # BF16 has 8 significant bits
    return ((ulps - ulps.floor() - 0.5).abs() < CLEAR).any(dim=-1)
