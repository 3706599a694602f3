"""Gumbel noise as vLLM's sampler draws it: a murmur3 hash of (seed, position, token id), and no generator.

The FP32 operations are those that vLLM's Triton kernel comes down to, fused multiply-adds and the division included, so
that a row of logits gives the same token here and there.
"""

import cutlass
from cutlass import cute

LENGTH = 16  # bytes hashed: 64 bits of the seed, 32 of the position, 32 of the token id
SMALLEST = 2.0**-24
RECIPROCALS = (1 / 7, 1 / 6, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)  # of the series for log(1 - u), behind its first, 1 / 8


def mix(state: cutlass.Uint32, key: cutlass.Uint32) -> cutlass.Uint32:
    """One 32-bit block of murmur3."""
    key = _rotate(key * cutlass.Uint32(0xCC9E2D51), 15) * cutlass.Uint32(0x1B873593)
    return _rotate(state ^ key, 13) * cutlass.Uint32(5) + cutlass.Uint32(0xE6546B64)


def finish(state: cutlass.Uint32) -> cutlass.Uint32:
    """murmur3's last avalanche."""
    state = state ^ cutlass.Uint32(LENGTH)
    state = (state ^ (state >> 16)) * cutlass.Uint32(0x85EBCA6B)
    state = (state ^ (state >> 13)) * cutlass.Uint32(0xC2B2AE35)
    return state ^ (state >> 16)


def prefix(seed: cutlass.Int64, position: cutlass.Int64) -> cutlass.Uint32:
    """The hash's state before the token id: one for all tokens of a draw."""
    state = mix(cutlass.Uint32(0), cutlass.Uint32(seed))
    state = mix(state, cutlass.Uint32(seed >> 32))
    return mix(state, cutlass.Uint32(position))


def negated_gumbel(state: cutlass.Uint32, token: cutlass.Uint32) -> cutlass.Float32:
    """log(-log(1 - u)), which is to be subtracted; u is uniform in (0, 1) and small where the noise is large."""
    bits = finish(mix(state, token))
    high = cutlass.Float32(cutlass.Int32(bits >> 16))
    low = (cutlass.Float32(cutlass.Int32(bits & cutlass.Uint32(0xFFFF))) + 0.5) * cutlass.Float32(2.0**-32)
    uniform = cute.math.fma(high, cutlass.Float32(2.0**-16), low)
    series = cutlass.Float32(1 / 8)
    for reciprocal in RECIPROCALS:
        series = cute.math.fma(uniform, series, cutlass.Float32(reciprocal))
    direct = -cute.math.log(cute.arch.fmax(1.0 - uniform, cutlass.Float32(SMALLEST)))
    return cute.math.log(cutlass.Float32(cutlass.select_(uniform < 0.25, uniform * series, direct)))


def divide(value: cutlass.Float32, divisor: cutlass.Float32) -> cutlass.Float32:
    """Good to 2 ulp over the whole range."""
    return cute.arch.inline_ptx(
        "div.full.f32 {$w0}, {$r0}, {$r1};", write_only_types=[cutlass.Float32], read_only_args=[value, divisor]
    )


def _rotate(word: cutlass.Uint32, places: int) -> cutlass.Uint32:
    return (word << places) | (word >> (32 - places))
