"""The draft's sampling loop: its steps one after the other over a rank's vocabulary shard, in one launch.

For each request r (state i = sample_idx_mapping[r, j], -1 for an inert one), with prev = input_ids[anchor_idx[r]] first
and the token of the step before afterwards, in step j for each token v of the shard:

    bias  = BF16(sum_k markov_w2[v - first_token, k] * markov_w1[prev, k])          FP32 sum in a fixed order
    x     = BF16(base_logits[r, j, v - first_token] + bias)
    logit = BF16(soft_cap * tanh(x * multiplier / soft_cap))                        without a cap: BF16(x * multiplier)
    draft_logits[i, j, v] = logit                                                   where i >= 0
    T, s  = temperature[i], seeds[i]                                                0, 0 where i < 0
    draft_tokens[r, j] = argmax_v of logit where T is 0, else of logit / T + G(s, j, sample_pos[r, j], v)

Of equal values the lowest token id wins; NaN counts as the largest value, as in torch.argmax. -0 equals 0. A row of
-inf gives its lowest id. The Gumbel noise G is vLLM 0.33.0's, which hashes (s ^ j << 32, sample_pos - 1 + 2^30, v):
kernel_specs/primitives/gumbel_noise.py. Integers wrap around in 64 bits.

`exchanged`: the vocabulary is shared by `world_size` ranks, whose winners meet in every step: this rank's go to slot
`ahead` of `winners` on the rank that many places ahead (mod world_size), for every `ahead` from 0, at the addresses
`peers`; so a table of nothing but its own address is a world of ranks that all find the same. The rank's logits, also
those of inert requests, are then `shard_logits`, which others gather: the cache must be whole on every rank.

`exchange` is memory of the launch's own: zero before the first launch that uses it, and left alone by everybody else.
All CTAs wait for each other in every step, so they must fit on the GPU at once (`Tiling.num_ctas` of them, one on a
multiprocessor); a wait of some twenty seconds ends, and leaves a mark in `exchange[1]`.
The weights are read before `griddepcontrol.wait`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import (
    CONST,
    VAR,
    AtLeast,
    AtMost,
    Case,
    Divisible,
    Equals,
    KernelSpec,
    Scalar,
    Specialization,
    Tensor,
)
from jitspark.target import TARGETS
from kernel_specs.markov_gumbel_sampling.tiling import (
    EXCHANGE_WORDS,
    LANES,
    MAX_CTAS,
    MAX_REQUESTS,
    MAX_WARPS,
    NUM_CTAS,
    PIECE,
    RESIDENT_BYTES,
    SHARED_WEIGHTS,
    Tiling,
    choose,
)
from kernel_specs.primitives.candidate_words import TOKEN_BITS

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

SAMPLES = ("num_requests", "num_steps")
NUM_STEPS = 7
# what a step brings beside logits and weights
STEP_INPUTS = ("input_ids", "anchor_idx", "sample_idx_mapping", "sample_pos", "seeds", "temperature")


def specialize(
    vocab_size: int, vocab_rows: int, markov_rank: int, num_steps: int, *, capped: bool, world_size: int = 1
) -> Specialization:
    """What serves any number of requests up to 8 over a shard of `vocab_rows` rows, exchanged over several ranks."""
    tiling = choose(vocab_rows, markov_rank)
    return SPEC.specialize(
        axes=_axes(vocab_size, tiling, num_steps, world_size),
        statics={"capped": capped, "exchanged": world_size > 1, **tiling.statics()},
    )


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """With and without a soft cap: the draft's configuration was not seen. A shard without its peers is for benches."""
    draft = deployment.draft
    for world_size in dict.fromkeys((deployment.tp, 1)):
        for capped in (True, False):
            yield specialize(
                draft.vocab_size,
                draft.vocab_rows(deployment.tp),
                draft.markov_rank,
                draft.num_speculative_tokens,
                capped=capped,
                world_size=world_size,
            )


def _axes(vocab_size: int, tiling: Tiling, num_steps: int, world_size: int) -> dict[str, int]:
    return {
        "vocab_size": vocab_size,
        "vocab_rows": tiling.vocab_rows,
        "markov_rank": tiling.markov_rank,
        "num_steps": num_steps,
        "exchange_words": tiling.exchange_words(num_steps),
        "world_size": world_size,
    }


def _case(
    num_requests: int,
    vocab_size: int,
    vocab_rows: int,
    markov_rank: int,
    note: str,
    *,
    capped: bool,
    world_size: int = 1,
) -> Case:
    tiling = choose(vocab_rows, markov_rank)
    return Case(
        axes={
            "num_requests": num_requests,
            "num_tokens": 9 * num_requests,
            "num_states": num_requests + 3,
            **_axes(vocab_size, tiling, NUM_STEPS, world_size),
        },
        dtypes={},
        statics={"capped": capped, "exchanged": world_size > 1, **tiling.statics()},
        # where a sum or tanh lies between two values, a rounding may go the other way, and move the next one
        rtol=2**-6,
        atol=2**-7,  # biases of up to 8, whose ulp times the multiplier stays when base and bias cancel
        note=note,
    )


CASES = (
    *(_case(r, 2048, 2048, 32, "tiny, whole", capped=True) for r in range(1, MAX_REQUESTS + 1)),
    *(_case(r, 2048, 1024, 32, "tiny at TP 2, a shard in the middle", capped=False) for r in (1, 3, 8)),
    *(_case(r, 3000, 1003, 64, "an odd number of rows", capped=True) for r in (1, 8)),
    *(_case(r, 8192, 5000, 96, "more rows than blocks", capped=False) for r in (2, 7)),
    *(_case(r, 202048, 12628, 512, "TP 16", capped=True) for r in (1, 8)),
    *(_case(r, 202048, 25256, 512, "TP 8", capped=True) for r in (1, 2, 4, 8)),
    _case(5, 202048, 25256, 512, "TP 8", capped=False),
    *(_case(r, 202048, 50512, 512, "TP 4, half of it from L2", capped=True) for r in (1, 8)),
    *(_case(r, 2048, 1024, 32, "its own peer", capped=True, world_size=2) for r in (1, 2, 6, 8)),
    *(_case(r, 202048, 25256, 512, "its own peers", capped=True, world_size=8) for r in (1, 7)),
)

SPEC = KernelSpec(
    name="markov_gumbel_sampling",
    axes={
        "num_requests": VAR,
        "num_tokens": VAR,
        "num_states": VAR,
        "vocab_size": CONST,
        "vocab_rows": CONST,  # of this rank
        "markov_rank": CONST,
        "num_steps": CONST,
        "exchange_words": CONST,  # Tiling.exchange_words
        "world_size": CONST,
    },
    dtypes={},
    statics={
        "capped": (True, False),
        "exchanged": (False, True),
        "warps": tuple(range(1, MAX_WARPS + 1)),  # of a CTA
        "warp_blocks": tuple(range(1, 9)),  # 16-row blocks of a warp
        "resident_blocks": tuple(range(9)),  # of these, kept in shared memory
    },
    args=(
        Tensor("base_logits", (*SAMPLES, "vocab_rows"), "bfloat16", align=2),
        Tensor("markov_w1", ("vocab_size", "markov_rank"), "bfloat16"),
        Tensor("markov_w2", ("vocab_rows", "markov_rank"), "bfloat16"),
        Tensor("input_ids", ("num_tokens",), "int32", align=4),
        Tensor("anchor_idx", ("num_requests",), "int64", align=8),
        Tensor("sample_idx_mapping", SAMPLES, "int64", align=8),
        Tensor("sample_pos", SAMPLES, "int64", align=8),
        Tensor("seeds", ("num_states",), "int64", align=8),
        Tensor("temperature", ("num_states",), "float32", align=4),
        Tensor("draft_tokens", SAMPLES, "int64", role="out", align=8),
        Tensor(
            "draft_logits",
            ("num_states", "num_steps", "vocab_size"),
            "bfloat16",
            role="inout",
            align=2,
            when=("exchanged", False),
        ),
        Tensor("shard_logits", (*SAMPLES, "vocab_rows"), "bfloat16", role="out", align=2, when=("exchanged", True)),
        Tensor("exchange", ("exchange_words",), "int64", role="state"),
        Tensor(
            "winners",
            ("num_steps", MAX_REQUESTS, "world_size"),
            "int64",
            role="state",
            align=8,
            when=("exchanged", True),
        ),
        Tensor("peers", ("world_size",), "int64", align=8, when=("exchanged", True)),
        Scalar("first_token", "int32"),
        Scalar("rank", "int32", when=("exchanged", True)),
        Scalar("multiplier", "float32"),
        Scalar("soft_cap", "float32", when=("capped", True)),
    ),
    constraints=(
        AtMost("num_requests", MAX_REQUESTS, because="requests are the columns of one MMA"),
        Divisible("markov_rank", by=PIECE, because="four lanes hold 16 bytes each of a row"),
        AtMost("vocab_rows", "vocab_size", because="a shard is a part"),
        AtMost("world_size", LANES, because="a lane sends to each rank"),
        AtMost("vocab_size", 1 << TOKEN_BITS, because="a token id shares 32 bits with the epoch"),
        AtMost("resident_blocks", "warp_blocks", because="no more stays than there is"),
        AtMost(RESIDENT_BYTES, SHARED_WEIGHTS, because="what stays lies in shared memory"),
        AtMost(NUM_CTAS, MAX_CTAS, because="all CTAs run at once: each waits for all others"),
        Equals("exchange_words", EXCHANGE_WORDS, because="a header, and a slot per step, request and CTA"),
        Equals("world_size", 1, because="with more ranks winners are exchanged", when=("exchanged", False)),
        AtLeast("world_size", 2, because="a rank alone has nothing to exchange", when=("exchanged", True)),
    ),
    targets=TARGETS,
    kernel="kernel:markov_gumbel_sampling",
    reference="reference:markov_gumbel_sampling",
    instructions=(
        "UBLKCP",  # bulk copies of the weight
        "HMMA.16816.F32.BF16",
        "CCTL",  # the prefetch of an embedding
        "LDG.E.64.STRONG.GPU",
        "STG.E.64.STRONG.GPU",
        "ACQBULK",
        "PREEXIT",
    ),
    cases=CASES,
    early_reads=("markov_w1", "markov_w2"),
)
