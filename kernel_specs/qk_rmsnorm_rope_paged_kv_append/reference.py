"""What `qk_rmsnorm_rope_paged_kv_append` computes, in float64 with the documented rounding points."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization

HEAD_DIM = 64
BLOCK_SIZE = 16
ROPE_THETA = 500000.0
ROW_SCALES = (1.0, 1e15, 1e-3, 0.0, 30.0, 1e-20, 1.0)


def qk_rmsnorm_rope_paged_kv_append(qkvg: Tensor, *rest: Any, rope: bool) -> None:
    """`rest` is [positions, cos_sin], slot_mapping, kv_cache, eps. Updates `qkvg` (q and k) and `kv_cache` in place."""
    *table, slot_mapping, kv_cache, eps = rest
    num_kv_heads = kv_cache.shape[1]
    heads = qkvg.view(qkvg.shape[0], -1, HEAD_DIM)
    first_key = heads.shape[1] // 2 - num_kv_heads
    first_value = first_key + num_kv_heads
    queries_and_keys = heads[:, :first_value].double()
    normed = queries_and_keys * torch.rsqrt(queries_and_keys.square().mean(dim=-1, keepdim=True) + eps)
    heads[:, :first_value] = (_rotate(normed, *table) if rope else normed).to(qkvg.dtype)
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    appended = torch.cat((heads[:, first_key:first_value], heads[:, first_value : first_value + num_kv_heads]), dim=-1)
    kv_cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = appended[kept]


def _rotate(heads: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    cosines, sines = cos_sin[positions].double()[:, None].chunk(2, dim=-1)
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1).flatten(-2)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Distinct slots, every fifth token without one; the last and the first position among random ones.

    The cache is token-major (NHD) when `num_blocks` is odd, head-major (HND) otherwise.
    """
    device = generator.device
    num_tokens, num_blocks = axes["num_tokens"], axes["num_blocks"]

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    scales = torch.tensor(ROW_SCALES, device=device).repeat(1 + num_tokens // len(ROW_SCALES))[:num_tokens, None]
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator, device=device)[:num_tokens]
    slots[3::5] = -1
    made = {
        "qkvg": (normal(num_tokens, axes["qkvg_size"]) * scales).bfloat16(),
        "slot_mapping": slots,
        "kv_cache": _cache(normal, num_blocks, axes["num_kv_heads"]),
        "eps": 1e-5,
    }
    if specialization.statics["rope"]:
        positions = torch.randint(axes["max_position"], (num_tokens,), generator=generator, device=device)
        positions[0] = axes["max_position"] - 1
        positions[1:2] = 0
        made |= {"positions": positions, "cos_sin": rope_table(axes["max_position"], device)}
    return made


def _cache(normal: Callable[..., Tensor], num_blocks: int, num_kv_heads: int) -> Tensor:
    if num_blocks % 2:
        token_major = normal(num_blocks, BLOCK_SIZE, num_kv_heads, 2 * HEAD_DIM).bfloat16()
        return token_major.permute(0, 2, 1, 3)
    return normal(num_blocks, num_kv_heads, BLOCK_SIZE, 2 * HEAD_DIM).bfloat16()


def rope_table(max_position: int, device: torch.device | str) -> Tensor:
    """FP32 [max_position, 64]: cosines of position * theta^(-2i/64) for i < 32, then the sines."""
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=device) / HEAD_DIM
    angles = torch.arange(max_position, dtype=torch.float64, device=device)[:, None] * ROPE_THETA**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()
