"""NVFP4 from FP32: scales in E4M3, codes in E2M1.

E2M1 has no conversion on Hopper, so codes come from exact FP32 and integer arithmetic on every target.
"""

import cutlass
from cutlass import cute

SIXTH = 0.1666666716337204  # FP32
HALVES = 4194304.0  # 2^22: FP32 numbers from here to 2^23 are multiples of 1/2
HALVES_WORD = 0x4A800000
SIGN = -(2**31)


def reciprocal(value: cutlass.Float32) -> cutlass.Float32:
    """Correctly rounded."""
    return cute.arch.inline_ptx("rcp.rn.f32 {$w0}, {$r0};", write_only_types=[cutlass.Float32], read_only_args=[value])


def round_e4m3(value: cutlass.Float32) -> tuple[cutlass.Int32, cutlass.Float32]:
    """(the byte, the number) nearest to a value that is not negative."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 pair, low, high; .reg .b32 halves; "
        "cvt.rn.satfinite.e4m3x2.f32 pair, {$r1}, {$r0}; cvt.u32.u16 {$w0}, pair; "
        "cvt.rn.f16x2.e4m3x2 halves, pair; mov.b32 {low, high}, halves; cvt.f32.f16 {$w1}, low; }",
        write_only_types=[cutlass.Int32, cutlass.Float32],
        read_only_args=[value, cutlass.Float32(0.0)],
    )


def code_e2m1(value: cutlass.Float32) -> cutlass.Int32:
    """The four bits of the nearest of 0, 1/2, 1, 3/2, 2, 3, 4, 6, ties to the even code, with the value's sign."""
    word = value.bitcast(cutlass.Int32)
    size = (word & ~SIGN).bitcast(cutlass.Float32)
    # Up to 2 the numbers are halves: adding 2^22 rounds to them, ties to even.
    code = (cute.arch.fmin(size, 2.0) + HALVES).bitcast(cutlass.Int32) - HALVES_WORD
    code += cutlass.Int32(size > 2.5) + cutlass.Int32(size >= 3.5) + cutlass.Int32(size > 5.0)
    return code | ((word >> 28) & 8)
