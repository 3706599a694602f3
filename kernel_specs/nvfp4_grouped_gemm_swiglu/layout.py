"""The experts' NVFP4 weights from the checkpoint's order into the kernels' own, and back. Torch only.

`repack` turns codes [experts, rows, columns / 2] (low four bits: the even column) and scales [experts, rows,
columns / 16] into

    codes  [experts, rows / 16, ranges, groups, 32 lanes, 4 words] of 32 bits
    scales [experts, rows / 16, ranges, 32 lanes, groups, 2 rows]

as bytes, one row per expert (`primitives/nvfp4_tiling.py` has the words). Lane 4 r + q has rows r and r + 8 of a tile;
in group j its codes are those of scale block q * groups + j of the range. Word s has the eight codes of MMA step s,
register by register: (row r, low pair), (row r + 8, low pair), (row r, high pair), (row r + 8, high pair), a register's
two columns in the word's two halves. So a warp's 16-byte loads are contiguous, and each is four whole MMA operands.
"""

# ruff: noqa: INP001 - kernel folders are namespace packages

import torch
from torch import Tensor

from kernel_specs.primitives.nvfp4_tiling import (
    BLOCK,
    LANES,
    MAGNITUDE_BITS,
    SIGN_BITS,
    STEPS,
    TILE_ROWS,
    split_columns,
    step_columns,
)


def repack_gate_up(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """w13 [E, 2 I, Hm / 2] and its scales [E, 2 I, Hm / 16], gate rows first, as FC1 reads them.

    A slice of every expert (rows of gate and up alike) or whole experts. A gate tile is followed by the up tile of the
    same 16 outputs.
    """
    return repack(_interleaved(codes), _interleaved(scales))


def unpack_gate_up(codes: Tensor, scales: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The inverse of `repack_gate_up`."""
    plain_codes, plain_scales = unpack(codes, scales, columns)
    return _separated(plain_codes), _separated(plain_scales)


def repack(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """w2 [E, rows, columns / 2] and scales [E, rows, columns / 16], uint8, as FC2 reads them: [E, bytes] each."""
    experts, rows, half = codes.shape
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    split = split_columns(2 * half)
    shape = (experts, rows // TILE_ROWS, 2, 8, split["ranges"], 4, split["groups"])
    blocks = nibbles.view(*shape, BLOCK)  # expert, tile, row / 8, row % 8, range, quad lane, group, column
    lanes = blocks.permute(0, 1, 4, 6, 3, 5, 2, 7)  # expert, tile, range, group, row % 8, quad lane, row / 8, column
    words = _words(lanes)
    packed = words.reshape(experts, -1).view(torch.uint8)
    packed_scales = scales.view(shape).permute(0, 1, 4, 3, 5, 6, 2).reshape(experts, -1)
    return packed.contiguous(), packed_scales.contiguous()


def unpack(codes: Tensor, scales: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The inverse of `repack`."""
    experts = codes.shape[0]
    rows = codes.shape[1] * 2 // columns
    split = split_columns(columns)
    ranges, groups, tiles = split["ranges"], split["groups"], rows // TILE_ROWS
    words = codes.contiguous().view(torch.int32).view(experts, tiles, ranges, groups, 8, LANES // 8, STEPS)
    blocks = _codes(words).permute(0, 1, 6, 4, 2, 5, 3, 7)
    nibbles = blocks.reshape(experts, rows, columns)
    plain_scales = scales.view(experts, tiles, ranges, 8, 4, groups, 2).permute(0, 1, 6, 3, 2, 4, 5)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4), plain_scales.reshape(experts, rows, columns // BLOCK)


def _places() -> list[tuple[int, int, int, int, int]]:
    """(step, row half, column of the block, bit of the sign, lowest bit of the magnitude) of all 32 codes of a lane."""
    return [
        (step, register % 2, columns[half], SIGN_BITS[register] + 16 * half, MAGNITUDE_BITS[register] + 16 * half)
        for step in range(STEPS)
        for register in range(4)
        for half, columns in ((half, step_columns(step)[register // 2]) for half in range(2))
    ]


def _words(lanes: Tensor) -> Tensor:
    """[..., row half, column] codes as [..., step] words."""
    words = torch.zeros((*lanes.shape[:-2], STEPS), dtype=torch.int32, device=lanes.device)
    for step, row, column, sign, magnitude in _places():
        code = lanes[..., row, column].int()
        words[..., step] |= ((code & 7) << magnitude) | ((code >> 3) << sign)
    return words


def _codes(words: Tensor) -> Tensor:
    """[..., step] words as [..., row half, column] codes."""
    codes = torch.zeros((*words.shape[:-1], 2, BLOCK), dtype=torch.uint8, device=words.device)
    for step, row, column, sign, magnitude in _places():
        word = words[..., step]
        codes[..., row, column] = (((word >> magnitude) & 7) | (((word >> sign) & 1) << 3)).to(torch.uint8)
    return codes


def _interleaved(rows: Tensor) -> Tensor:
    """[E, 2 I, n] with gate rows first -> 16 gate rows and 16 up rows in turn."""
    return rows.unflatten(1, (2, -1, TILE_ROWS)).transpose(1, 2).flatten(1, 3)


def _separated(rows: Tensor) -> Tensor:
    return rows.unflatten(1, (-1, 2, TILE_ROWS)).transpose(1, 2).flatten(1, 3)
