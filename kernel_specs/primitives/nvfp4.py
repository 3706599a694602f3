"""NVFP4 operands for mma.sync m16n8k16 on FP16: loaded, unpacked exactly, multiplied.

An E2M1 code whose magnitude stands at bits 11 to 9 and whose sign at bit 15 is an FP16 number 2^-14 times its value.
Times an E4M3 scale it is a multiple of 2^-24 below 2^-2 with at most 6 significant bits: exact in FP16, subnormal or
not. So a product of two operands is exact, 2^-28 times its value (`UNSCALE`), and only FP32 sums round.
"""

import cutlass
from cutlass import cute

from kernel_specs.primitives.nvfp4_tiling import LANES, MAGNITUDE_BITS, SIGN_BITS, STEPS, TOKENS

UNSCALE = 268435456.0  # 2^28
SIGNS = 0x80008000 - 2**32
MAGNITUDES = 0x0E000E00
ITEM = 4  # sums of a lane in an MMA
TILE_SUMS = LANES * ITEM
CHAINS = 2  # accumulators of a tile: an MMA need not wait for the one before

Words = tuple[cutlass.Int32, ...]
Columns = list[list[cutlass.Int32]]  # of the activations: eight words of each group


def load_words(start: cute.Pointer, words: int) -> list[cutlass.Int32]:
    """4 * words bytes, aligned to as many or to 16."""
    loaded = cute.make_rmem_tensor((words,), cutlass.Int32)
    cute.autovec_copy(cute.make_tensor(cute.recast_ptr(start, dtype=cutlass.Int32), cute.make_layout(words)), loaded)
    return [loaded[i] for i in range(words)]


def load_half(start: cute.Pointer) -> cutlass.Int32:
    """Two aligned bytes in the lower half of a word."""
    half = cute.make_tensor(cute.recast_ptr(start, dtype=cutlass.Uint16), cute.make_layout(1))
    return cutlass.Int32(half[0])


class TokenOperands:
    """A lane's part of one range of the activations of one token."""

    def __init__(self, codes: cute.Pointer, scales: cute.Pointer, groups: int) -> None:
        self.codes = load_words(codes, groups * 2)
        self.scales = load_words(scales, groups // 4) if groups > 2 else [load_half(scales)]


def unpack_interleaved(word: cutlass.Int32) -> list[cutlass.Int32]:
    """Eight codes of the weights' layout as the four registers of an MMA's row operand."""
    registers = []
    for sign, magnitude in zip(SIGN_BITS, MAGNITUDE_BITS, strict=True):
        low = word << (9 - magnitude) if magnitude != 9 else word
        high = word << (15 - sign) if sign != 15 else word
        if 9 - magnitude == 15 - sign:
            registers.append(low & (SIGNS | MAGNITUDES))
        else:
            registers.append((low & MAGNITUDES) | (high & SIGNS))
    return registers


def unpack(word: cutlass.Int32) -> list[cutlass.Int32]:
    """Eight codes in memory order as columns (0, 4), (1, 5), (2, 6), (3, 7)."""
    registers = []
    for j in range(4):
        magnitudes = word << (9 - 4 * j) if j < 3 else word >> 3
        signs = word << (12 - 4 * j) if j < 3 else word
        registers.append((magnitudes & MAGNITUDES) | (signs & SIGNS))
    return registers


def widen_scales(word: cutlass.Int32) -> Words:
    """Four E4M3 numbers, each twice as FP16 in a word."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 low, high; .reg .b32 pair, next; mov.b32 {low, high}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 pair, low; cvt.rn.f16x2.e4m3x2 next, high; "
        "prmt.b32 {$w0}, pair, pair, 0x1010; prmt.b32 {$w1}, pair, pair, 0x3232; "
        "prmt.b32 {$w2}, next, next, 0x1010; prmt.b32 {$w3}, next, next, 0x3232; }",
        write_only_types=[cutlass.Int32] * 4,
        read_only_args=[word],
    )


def scaled(pair: cutlass.Int32, scale: cutlass.Int32) -> cutlass.Int32:
    """Two FP16 products."""
    return cute.arch.inline_ptx(
        "mul.rn.f16x2 {$w0}, {$r0}, {$r1};", write_only_types=[cutlass.Int32], read_only_args=[pair, scale]
    )


def multiply(sums: cute.Tensor, first: int, rows: Words, low: cutlass.Int32, high: cutlass.Int32) -> None:
    """Add one m16n8k16 product to sums[first:first + 4]."""
    results = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[cutlass.Float32] * ITEM,
        read_only_args=[*rows, low, high, *(sums[first + i] for i in range(ITEM))],
    )
    for i in range(ITEM):
        sums[first + i] = results[i]


def own_part(tokens: TokenOperands, groups: int) -> Columns:
    """The lane's columns of each group, unpacked and scaled."""
    factors = [factor for word in tokens.scales for factor in widen_scales(word)]
    return [
        [scaled(half, factors[g]) for i in range(2) for half in unpack(tokens.codes[2 * g + i])] for g in range(groups)
    ]


def multiply_tile(
    sums: cute.Tensor, stage: cute.Pointer, code_bytes: int, columns: Columns, lane: cutlass.Int32
) -> None:
    """Add a tile's range in shared memory, codes before scales, times the columns to `CHAINS` times four sums."""
    groups = len(columns)
    scales = load_words(stage + cute.assume(code_bytes + lane * (2 * groups), 2 * groups), groups // 2)
    factors = [factor for word in scales for factor in widen_scales(word)]
    for group in range(groups):
        words: list[cutlass.Int32] = load_words(stage + cute.assume(group * (LANES * 16) + lane * 16, 16), STEPS)
        low, high = factors[2 * group], factors[2 * group + 1]
        for step in range(STEPS):
            pairs = unpack_interleaved(words[step])
            rows: Words = tuple(scaled(pair, high if i % 2 else low) for i, pair in enumerate(pairs))
            chain = step % CHAINS * ITEM
            multiply(sums, chain, rows, columns[group][2 * step], columns[group][2 * step + 1])


def leave(sums: cute.Tensor, tile: int, slot: cute.Pointer, lane: cutlass.Int32) -> None:
    """Put a tile's sums into its slot (`TILE_SUMS` FP32 numbers) of shared memory."""
    item = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
    for i in range(ITEM):
        item[i] = sums[tile * ITEM + i]
    cute.autovec_copy(item, cute.make_tensor(slot + cute.assume(lane * ITEM, ITEM), cute.make_layout(ITEM)))


def place(row: cutlass.Int32, token: cutlass.Int32) -> cutlass.Int32:
    """Where in a tile's slot the sum of a row and a token lies."""
    return (row % 8 * (TOKENS // 2) + token // 2) * ITEM + row // 8 * 2 + token % 2


def add_ranges(slots: cute.Tensor, at: cutlass.Int32, ranges: int, stride: int) -> cutlass.Float32:
    """The sum over all ranges, in order. It begins with +0, so that a sum of zeros is +0."""
    total = cutlass.Float32(0.0)
    for number in range(ranges):
        total = total + slots[at + number * stride]
    return total * UNSCALE
