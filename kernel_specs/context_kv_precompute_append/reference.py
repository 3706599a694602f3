"""What `context_kv_precompute_append` computes, in float64 with the documented rounding points."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization

HEAD_DIM = 64
BLOCK_SIZE = 16
ROPE_THETA = 500000.0
ROW_SCALES = (1.0, 1e15, 1e-3, 0.0, 30.0, 1e-20, 1.0)


def context_kv_precompute_append(kv: Tensor, *rest: Any, rope: bool, num_layers: int) -> None:
    """`rest` is [positions, cos_sin], the slot mappings, the KV caches, eps. Updates the caches in place."""
    *table, eps = rest
    slot_mappings, kv_caches = table[-2 * num_layers : -num_layers], table[-num_layers:]
    heads = kv.view(kv.shape[0], num_layers, 2, -1, HEAD_DIM)
    keys = heads[:, :, 0].double()
    keys = (keys * torch.rsqrt(keys.square().mean(dim=-1, keepdim=True) + eps)).to(kv.dtype)
    if rope:
        keys = _rotate(keys.double(), *table[:2]).to(kv.dtype)
    for layer, (slot_mapping, kv_cache) in enumerate(zip(slot_mappings, kv_caches, strict=True)):
        kept = slot_mapping >= 0
        slots = slot_mapping[kept]
        appended = torch.cat((keys[:, layer], heads[:, layer, 1]), dim=-1)
        kv_cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = appended[kept]


def _rotate(keys: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    cosines, sines = cos_sin[positions].double()[:, None, None].chunk(2, dim=-1)
    even, odd = keys[..., 0::2], keys[..., 1::2]
    return torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1).flatten(-2)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Other distinct slots in each layer, every fifth row without one; the last and the first position among others.

    The caches are token-major (NHD) when `num_blocks` is odd, head-major (HND) otherwise.
    """
    device, num_tokens = generator.device, axes["num_tokens"]
    num_blocks, num_kv_heads = axes["num_blocks"], axes["num_kv_heads"]
    scales = torch.tensor(ROW_SCALES, device=device).repeat(1 + num_tokens // len(ROW_SCALES))[:num_tokens, None]
    kv = torch.randn((num_tokens, axes["kv_size"]), generator=generator, device=device)
    made: dict[str, Tensor | float] = {"kv": (kv * scales).bfloat16(), "eps": 1e-5}
    for layer in range(int(specialization.statics["num_layers"])):
        slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator, device=device)[:num_tokens]
        slots[3 + layer :: 5] = -1
        made[f"slot_mapping_{layer}"] = slots
        made[f"kv_cache_{layer}"] = _cache(generator, num_blocks, num_kv_heads)
    if specialization.statics["rope"]:
        positions = torch.randint(axes["max_position"], (num_tokens,), generator=generator, device=device)
        positions[0] = axes["max_position"] - 1
        positions[1:2] = 0
        made |= {"positions": positions, "cos_sin": rope_table(axes["max_position"], device)}
    return made


def _cache(generator: torch.Generator, num_blocks: int, num_kv_heads: int) -> Tensor:
    if num_blocks % 2:
        size: tuple[int, ...] = (num_blocks, BLOCK_SIZE, num_kv_heads, 2 * HEAD_DIM)
        token_major = torch.randn(size, generator=generator, device=generator.device).bfloat16()
        return token_major.permute(0, 2, 1, 3)
    size = (num_blocks, num_kv_heads, BLOCK_SIZE, 2 * HEAD_DIM)
    return torch.randn(size, generator=generator, device=generator.device).bfloat16()


def rope_table(max_position: int, device: torch.device | str) -> Tensor:
    """FP32 [max_position, 64]: cosines of position * theta^(-2i/64) for i < 32, then the sines."""
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=device) / HEAD_DIM
    angles = torch.arange(max_position, dtype=torch.float64, device=device)[:, None] * ROPE_THETA**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()
