"""mma.sync m16n8k16 on BF16: its operands from 128-byte-swizzled shared memory with ldmatrix, its products in FP32.

A tile is rows of 64 BF16 columns (128 bytes) as a bulk tensor copy with the 128-byte swizzle leaves them: 16-byte
chunk c of row r lies at chunk c ^ (r % 8). Addresses are shared-memory addresses in bytes, tiles start at multiples of
1024. Lane l of a product's 16 x 8 sums holds rows l / 4 and l / 4 + 8 (`sums[2:]`), columns 2 (l % 4) and the next.
"""

import cutlass
from cutlass import cute

ROW_BYTES = 128
CHUNK_BYTES = 16

Words = tuple[cutlass.Int32, cutlass.Int32, cutlass.Int32, cutlass.Int32]


def rows_offset(lane: cutlass.Int32) -> cutlass.Int32:
    """Lane's offset for `load` of 16 rows x 16 columns as the column operand of a product over columns.

    The words are (rows 0..7, columns 0..7), (rows 0..7, columns 8..15), and the same of rows 8..15. For columns
    16 k.. the offset is `rows_offset ^ (32 * k)`: the swizzle is a XOR too.
    """
    row = (lane >> 4) * 8 + (lane & 7)
    return row * ROW_BYTES + (((lane >> 3) & 1) ^ (lane & 7)) * CHUNK_BYTES


def transposed_offset(lane: cutlass.Int32) -> cutlass.Int32:
    """Lane's offset for a transposed `load` of 16 rows x 16 columns as the column operand of a product over rows.

    The words are (rows 0..7, columns 0..7), (rows 8..15, columns 0..7), and the same of columns 8..15. For columns
    16 k.. the offset is `transposed_offset ^ (32 * k)`.
    """
    return (lane & 15) * ROW_BYTES + ((lane >> 4) ^ (lane & 7)) * CHUNK_BYTES


def load(address: cutlass.Int32, *, transposed: bool) -> Words:
    """Four 8 x 8 matrices, each lane giving the address of one row of one of them (lanes 8 i.. of matrix i)."""
    kind = "x4.trans" if transposed else "x4"
    words: Words = cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8." + kind + ".shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[cutlass.Int32] * 4,
        read_only_args=[address],
    )
    return words


def multiply(sums: cute.Tensor, first: int, rows: Words, column_low: cutlass.Int32, column_high: cutlass.Int32) -> None:
    """Add one m16n8k16 product to sums[first:first + 4]."""
    results = cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[cutlass.Float32] * 4,
        read_only_args=[*rows, column_low, column_high, *(sums[first + i] for i in range(4))],
    )
    for i in range(4):
        sums[first + i] = results[i]


def pack(low: cutlass.Float32, high: cutlass.Float32) -> cutlass.Int32:
    """Two values rounded to BF16 (nearest, ties to even) in one word."""
    return cute.arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};", write_only_types=[cutlass.Int32], read_only_args=[low, high]
    )
