"""Eight neighbouring columns of a normed row as NVFP4, two neighbouring lanes to a scale: what two kernels share."""

import cutlass
from cutlass import cute

from kernel_specs.primitives.nvfp4_codes import SIXTH, code_e2m1, reciprocal, round_e4m3
from kernel_specs.primitives.row_split import VECTOR


def quantize_vector(
    exact: cute.TensorSSA, scale: cutlass.Float32, inverse_scale: cutlass.Float32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """(the word of a lane's VECTOR codes, the byte of its block's scale) of FP32 norms, after rounding to BF16.

    The lanes of a warp call it together; lanes 2i and 2i + 1 get the same byte.
    """
    normed = []
    for i in range(0, VECTOR, 2):
        normed += round_bfloat16_pair(exact[i], exact[i + 1])
    largest = cutlass.Float32(0.0)
    for i in range(VECTOR):
        largest = cute.arch.fmax(largest, cute.arch.fmax(normed[i], -normed[i]))
    largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1))
    byte, block_scale = round_e4m3(scale * (largest * SIXTH))
    factor = cutlass.select_(block_scale == 0.0, cutlass.Float32(0.0), reciprocal(block_scale * inverse_scale))
    word = cutlass.Int32(0)
    for i in range(VECTOR):
        word = word | (code_e2m1(normed[i] * factor) << (4 * i))
    return word, byte


def round_bfloat16_pair(low: cutlass.Float32, high: cutlass.Float32) -> tuple[cutlass.Float32, cutlass.Float32]:
    """Both rounded to BF16 by one instruction (conversions one by one run at a quarter of its rate)."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 pair, part; cvt.rn.bf16x2.f32 pair, {$r1}, {$r0}; "
        "shl.b32 part, pair, 16; mov.b32 {$w0}, part; and.b32 part, pair, 0xFFFF0000; mov.b32 {$w1}, part; }",
        write_only_types=[cutlass.Float32, cutlass.Float32],
        read_only_args=[low, high],
    )
