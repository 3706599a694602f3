"""The k largest scores that the lanes of a warp hold, by keys that order them and their experts.

A key is larger than another when its score is, or when the scores are equal and its expert is the lower one; no two are
equal. A number's upper half is never 0, which stands for no expert.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

WARP = 32
LOWEST_LOGIT = -87.0  # e^87 is finite in FP32

LOG2_E = 1.4426950216293335  # FP32
LOG2_E_REST = 1.9259629911266175e-08  # what FP32 leaves of it
LN_2 = 0.6931471805599453

Keys = list[cutlass.Uint64]


def sigmoid(logit: cutlass.Float32) -> cutlass.Float32:
    """Good to a few ulp also where the exponent is large: what the product with log2(e) loses is put back."""
    negated = -cute.arch.fmax(logit, LOWEST_LOGIT)
    exponent = negated * LOG2_E
    rest = cute.math.fma(negated, LOG2_E, -exponent) + negated * LOG2_E_REST
    power = cute.math.exp2(exponent, fastmath=True)
    return cute.arch.rcp_approx(1.0 + cute.math.fma(power, rest * LN_2, power))


def ordered(score: cutlass.Float32) -> cutlass.Uint32:
    """An integer that is larger when the score is; never 0 for a number."""
    word = score.bitcast(cutlass.Int32)
    return (word ^ ((word >> 31) | cutlass.Int32(-(2**31)))).bitcast(cutlass.Uint32)


def join(high: cutlass.Uint32, low: cutlass.Int32) -> cutlass.Uint64:
    return (cutlass.Uint64(high) << 32) | cutlass.Uint64(cutlass.Uint32(low))


def pick(condition: cutlass.Boolean, one: cutlass.Uint64, other: cutlass.Uint64) -> cutlass.Uint64:
    """`select_` gives a value without a type, whose comparisons would be signed."""
    return cutlass.Uint64(cutlass.select_(condition, one, other))


def sort_descending(keys: Keys) -> Keys:
    """Batcher's odd-even merge sort of a power of two of different keys."""
    count = len(keys)
    keys = list(keys)
    width = 1
    while width < count:
        step = width
        while step >= 1:
            for start in range(step % width, count - step, 2 * step):
                for i in range(start, min(start + step, count - step)):
                    if i // (2 * width) == (i + step) // (2 * width):
                        ahead = keys[i] > keys[i + step]
                        keys[i], keys[i + step] = (
                            pick(ahead, keys[i], keys[i + step]),
                            pick(ahead, keys[i + step], keys[i]),
                        )
            step //= 2
        width *= 2
    return keys


def take_largest(keys: Keys, count: int, take: Callable[[int, cutlass.Boolean, cutlass.Int32], None]) -> None:
    """The `count` largest of the keys that the lanes of a warp hold, each lane's in descending order.

    A round calls take(its number, whether this lane holds the largest key, that key's low word in such a lane). Upper
    halves are compared across lanes, so of lanes that are equal in it the lowest comes first.
    """
    below = cute.arch.lanemask_lt()
    for number in range(count):
        best = cutlass.Uint32(keys[0] >> 32)
        equal = best == cute.arch.warp_redux_sync(best, "umax")
        winners = cutlass.Uint32(cute.arch.vote_ballot_sync(equal))
        chosen = equal & ((winners & below) == 0)
        take(number, chosen, cutlass.Int32(cutlass.Uint32(keys[0])))
        behind = [*keys[1:], cutlass.Uint64(0)]
        # the rounds to come take no more than this many keys from the lane
        keys = [pick(chosen, behind[i], keys[i]) for i in range(min(len(keys), count - number - 1))]
