"""mma.sync on BF16 operands whose fragments are read 16 bytes at a time from 128-byte-swizzled shared memory.

A lane's 16 bytes are 8 neighbouring elements of K, which it uses for two k16 steps: a product sees the columns of a
32-column half block in an order of its own. Both operands use that order, hence each sum is over the same products as
in column order. In shared memory a block is rows of 64 columns (128 bytes) as a bulk tensor copy with the 128-byte
swizzle leaves them: 16-byte chunk c of row r lies at chunk c ^ (r % 8).
"""

import cutlass
from cutlass import cute

LANES = 32
ROWS = 16  # of the row operand
TOKENS = 8  # columns of the other operand
ROW_BYTES = 128  # of a block
HALVES = 2  # a block is two 32-column halves

Words = tuple[cutlass.Int32, cutlass.Int32, cutlass.Int32, cutlass.Int32]


def fragment_row(lane: cutlass.Int32) -> cutlass.Int32:
    """The row, of 8, that this lane reads.

    Lanes 8i to 8i + 7 read together; their two rows are 4 apart, which the swizzle maps to disjoint banks.
    """
    group = lane // 4
    return group // 2 + (group % 2) * 4


def chunk_offset(lane: cutlass.Int32, half: int) -> cutlass.Int32:
    """Where, in bytes within 8 rows of a block, the lane's chunk of 32-column half `half` lies."""
    row = fragment_row(lane)
    return row * ROW_BYTES + ((lane % 4 + half * 4) ^ row) * 16


def load_chunk(shared: cute.Pointer, offset: cutlass.Int32) -> Words:
    """16 bytes at byte `offset` (a multiple of 16) of `shared`: two words for one k16 step, two for the next."""
    words = cute.make_rmem_tensor((4,), cutlass.Int32)
    start = cute.recast_ptr(shared + cute.assume(offset, 16), dtype=cutlass.Int32)
    cute.autovec_copy(cute.make_tensor(start, cute.make_layout(4)), words)
    return words[0], words[1], words[2], words[3]


def mma_two_steps(sums: cute.Tensor, first: int, second: int, low: Words, high: Words, columns: Words) -> None:
    """Add 16 rows x 8 columns over 32 of K: the first k16 step to sums[first:first + 4], the other to sums[second:].

    `low` and `high` are the lane's words of rows r and r + 8 of the row operand, `columns` those of the other one.
    """
    for step, at in ((0, first), (2, second)):
        a = (low[step], high[step], low[step + 1], high[step + 1])
        results = cute.arch.inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
            "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[cutlass.Float32] * 4,
            read_only_args=[*a, columns[step], columns[step + 1], *(sums[at + i] for i in range(4))],
        )
        for i in range(4):
            sums[at + i] = results[i]
