"""What the references of `head_rows` share: RoPE, its table, the append, and what a paged KV cache holds before."""

import torch
from torch import Tensor

HEAD_DIM = 64
BLOCK_SIZE = 16
ROPE_THETA = 500000.0
ROW_SCALES = (1.0, 1e15, 1e-3, 0.0, 30.0, 1e-20, 1.0)


def rotate(heads: Tensor, positions: Tensor, cos_sin: Tensor) -> Tensor:
    """Interleaved pairs of heads [num_tokens, ..., 64] turned by the angles of their tokens' positions, in float64."""
    angles = cos_sin[positions].double().view(len(positions), *[1] * (heads.dim() - 2), HEAD_DIM)
    cosines, sines = angles.chunk(2, dim=-1)
    even, odd = heads[..., 0::2], heads[..., 1::2]
    return torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1).flatten(-2)


def append(kv_cache: Tensor, slot_mapping: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [num_tokens, num_kv_heads, 64] to the tokens' slots; negative ones are no slots."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    kv_cache[slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = torch.cat((keys, values), dim=-1)[kept]


def draw_slots(num_tokens: int, num_blocks: int, first_without: int, generator: torch.Generator) -> Tensor:
    """Distinct slots, and none for every fifth token from `first_without` on."""
    slots = torch.randperm(num_blocks * BLOCK_SIZE, generator=generator, device=generator.device)[:num_tokens]
    slots[first_without::5] = -1
    return slots


def draw_cache(num_blocks: int, num_kv_heads: int, generator: torch.Generator) -> Tensor:
    """[num_blocks, num_kv_heads, 16, 128]: token-major (NHD) when `num_blocks` is odd, else head-major (HND)."""
    inner = (BLOCK_SIZE, num_kv_heads) if num_blocks % 2 else (num_kv_heads, BLOCK_SIZE)
    size = (num_blocks, *inner, 2 * HEAD_DIM)
    drawn = torch.randn(size, generator=generator, device=generator.device).bfloat16()
    return drawn.transpose(1, 2) if num_blocks % 2 else drawn


def draw_positions(num_tokens: int, max_position: int, generator: torch.Generator) -> dict[str, Tensor]:
    """The last and the first position among random ones, and the table that they are looked up in."""
    positions = torch.randint(max_position, (num_tokens,), generator=generator, device=generator.device)
    positions[0] = max_position - 1
    positions[1:2] = 0
    return {"positions": positions, "cos_sin": rope_table(max_position, generator.device)}


def rope_table(max_position: int, device: torch.device | str) -> Tensor:
    """FP32 [max_position, 64]: cosines of position * theta^(-2i/64) for i < 32, then the sines."""
    exponents = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=device) / HEAD_DIM
    angles = torch.arange(max_position, dtype=torch.float64, device=device)[:, None] * ROPE_THETA**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()
