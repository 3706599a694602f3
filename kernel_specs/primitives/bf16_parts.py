"""FP32 numbers as the exact sum of three BF16 numbers (24 = 3 * 8 significant bits), two at a time."""

import cutlass
from cutlass import cute

PARTS = 3

Words = tuple[cutlass.Int32, ...]


def load_words(start: cute.Pointer) -> Words:
    """16 aligned bytes."""
    words = cute.make_rmem_tensor((4,), cutlass.Int32)
    cute.autovec_copy(cute.make_tensor(cute.recast_ptr(start, dtype=cutlass.Int32), cute.make_layout(4)), words)
    return words[0], words[1], words[2], words[3]


def split_pair(low: cutlass.Int32, high: cutlass.Int32) -> Words:
    """Two FP32 numbers as three words of two BF16 numbers each, the first ones 8 bits, the next ones 8 bits, the rest.

    Each part is what precedes it leaves, cut after its top 16 bits: subtracting it is exact.
    """
    return cute.arch.inline_ptx(
        "{ .reg .b32 cut; .reg .f32 low, high, top; "
        "prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632; "
        "and.b32 cut, {$r0}, 0xFFFF0000; mov.b32 top, cut; mov.b32 low, {$r0}; sub.f32 low, low, top; "
        "and.b32 cut, {$r1}, 0xFFFF0000; mov.b32 top, cut; mov.b32 high, {$r1}; sub.f32 high, high, top; "
        ".reg .b32 a, b; mov.b32 a, low; mov.b32 b, high; prmt.b32 {$w1}, a, b, 0x7632; "
        "and.b32 cut, a, 0xFFFF0000; mov.b32 top, cut; sub.f32 low, low, top; "
        "and.b32 cut, b, 0xFFFF0000; mov.b32 top, cut; sub.f32 high, high, top; "
        "mov.b32 a, low; mov.b32 b, high; prmt.b32 {$w2}, a, b, 0x7632; }",
        write_only_types=[cutlass.Int32] * PARTS,
        read_only_args=[low, high],
    )
