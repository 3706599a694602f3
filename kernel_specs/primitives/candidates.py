"""Candidates for the next token, and the words in which CTAs tell each other theirs.

A candidate is two words: one that orders values, and the complement of the token id, so that of equal values the lowest
id is the larger candidate. (0, 0) stands for none.

A slot's word is its own flag: value, epoch and token id travel in one 64-bit store, which a reader sees whole or not at
all. A reader repeats its load until the word is of this launch's epoch. Every launch writes every slot, so that a slot
never holds an epoch older than the last launch's.
"""

import cutlass
from cutlass import cute

from kernel_specs.primitives.candidate_words import EPOCH_BITS, TOKEN_BITS
from kernel_specs.primitives.warp_topk import ordered

LANES = 32
TOKEN_MASK = (1 << TOKEN_BITS) - 1
EPOCH_MASK = (1 << EPOCH_BITS) - 1
PATIENCE = 1 << 27  # rounds of polling: 23 s at the 0.17 us that one takes on an H200, as long as exchanges wait
NAN = 0x7FFFFFFF

Candidate = tuple[cutlass.Uint32, cutlass.Uint32]


def candidate(value: cutlass.Float32, token: cutlass.Int32) -> Candidate:
    """As torch.argmax orders values: NaN is the largest, and -0 equals 0."""
    word = value.bitcast(cutlass.Int32)
    word = cutlass.Int32(cutlass.select_(value == 0.0, cutlass.Int32(0), word))
    word = cutlass.Int32(cutlass.select_(value == value, word, cutlass.Int32(NAN)))  # noqa: PLR0124 - NaN
    return ordered(word.bitcast(cutlass.Float32)), ~cutlass.Uint32(token)


def larger(one: Candidate, other: Candidate) -> Candidate:
    ahead = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] > other[1]))
    return select(ahead, one, other)


def select(condition: cutlass.Boolean, one: Candidate, other: Candidate) -> Candidate:
    """`select_` gives a value without a type, whose comparisons would be signed."""
    return (
        cutlass.Uint32(cutlass.select_(condition, one[0], other[0])),
        cutlass.Uint32(cutlass.select_(condition, one[1], other[1])),
    )


def largest_of_lanes(one: Candidate, distances: tuple[int, ...]) -> Candidate:
    """The largest over lanes whose numbers differ in these bits."""
    for distance in distances:
        other = (
            cutlass.Uint32(cute.arch.shuffle_sync_bfly(one[0].bitcast(cutlass.Int32), distance)),
            cutlass.Uint32(cute.arch.shuffle_sync_bfly(one[1].bitcast(cutlass.Int32), distance)),
        )
        one = larger(one, other)
    return one


def largest_of_warp(one: Candidate) -> Candidate:
    value = cutlass.Uint32(cute.arch.warp_redux_sync(one[0], "umax"))
    rest = cutlass.Uint32(cutlass.select_(one[0] == value, one[1], cutlass.Uint32(0)))
    return value, cutlass.Uint32(cute.arch.warp_redux_sync(rest, "umax"))


def word_of(one: Candidate, epoch: cutlass.Uint32) -> cutlass.Uint64:
    low = (epoch << TOKEN_BITS) | (~one[1] & cutlass.Uint32(TOKEN_MASK))
    return (cutlass.Uint64(one[0]) << 32) | cutlass.Uint64(low)


def token_of(one: Candidate) -> cutlass.Int32:
    return cutlass.Int32(~one[1] & cutlass.Uint32(TOKEN_MASK))


@cute.jit
def publish(slot: cute.Pointer, word: cutlass.Uint64 | cutlass.Int64, scope: cutlass.Constexpr) -> None:
    cute.arch.store(slot, cutlass.Int64(word), sem="relaxed", scope=scope)


@cute.jit
def await_largest(
    slots: cute.Pointer,
    count: cutlass.Constexpr,
    epoch: cutlass.Uint32,
    patience: cute.Tensor,
    lane: cutlass.Int32,
    scope: cutlass.Constexpr,
) -> Candidate:
    """The largest of `count` slots' candidates, once all are of `epoch`; `patience` is 0 afterwards if they never were.

    A warp polls together. Whoever has lost patience once does not wait again, so a launch ends in any case.
    """
    high = cute.make_rmem_tensor((2,), cutlass.Uint32)
    rounds = cutlass.Int32(0)
    waiting = rounds == 0
    while waiting:
        best = (cutlass.Uint32(0), cutlass.Uint32(0))
        fresh = lane >= 0
        words = []
        for i in cutlass.range_constexpr(-(-count // LANES)):
            slot = cutlass.min(lane + i * LANES, count - 1)
            words.append(cutlass.Uint64(cute.arch.load(slots + slot, cutlass.Int64, sem="relaxed", scope=scope)))
        for i in cutlass.range_constexpr(-(-count // LANES)):
            low = cutlass.Uint32(words[i])
            fresh = fresh & ((low >> TOKEN_BITS) == epoch)
            # an empty slot has no value: it must not win by its token's complement
            best = larger(best, (cutlass.Uint32(words[i] >> 32), ~(low & cutlass.Uint32(TOKEN_MASK))))
        high[0], high[1] = best
        rounds += 1
        stale = not cute.arch.vote_all_sync(fresh)
        waiting = stale & (rounds < patience[0])
        if stale & (rounds >= patience[0]):
            patience[0] = 0
    return largest_of_warp((high[0], high[1]))
