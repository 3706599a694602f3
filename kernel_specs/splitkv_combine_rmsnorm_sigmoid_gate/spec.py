"""Merge of `paged_gqa_verify_attention`'s partial results, then the norm per head and the sigmoid output gate.

    weight_s <- 2^(partial_max_s - max(partial_max))           0 where partial_max_s is -inf: a split without keys
    o        <- BF16(sum(weight_s * partial_out_s) / sum(weight_s * partial_sum_s))
    out      <- BF16(o * rsqrt(mean_64(o^2) + eps) * sigmoid(gate))

over the splits of each token and head, FP32 inside; the splits are added in a fixed order. What a split without keys
holds besides its maximum is not used. `gate` is the last num_heads * 64 columns of `qkvg`. A token none of whose splits
has keys (padding) gets zeros, whatever its gate is.
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

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Attention, Deployment

HEAD_DIM = 64

# Per rank at TP 4, 8, 16, then the tiny geometries at TP 1 and 2.
HEADS = ((32, 4), (16, 2), (8, 1), (8, 2), (4, 1))
BY_SPLIT = ("num_tokens", "num_heads", "num_splits")
THREADS = 128  # eight times 16 lanes: 64 splits are 8 loads a lane, all in flight at once
MAX_SPLITS = 160


def _sizes(num_heads: int, num_kv_heads: int) -> dict[str, int]:
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "qkvg_size": 2 * HEAD_DIM * (num_heads + num_kv_heads),
        "attention_size": num_heads * HEAD_DIM,
    }


def _case(num_tokens: int, heads: tuple[int, int], num_splits: int) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, **_sizes(*heads), "num_splits": num_splits},
        dtypes={},
        statics={"threads": THREADS},
        # o is rounded in the middle: where FP32 and float64 fall on two sides of a tie, out moves by an ulp of o
        rtol=2**-6,
        atol=1e-6,
        note="splits and tokens without keys that hold NaN, maxima far apart, gates that saturate",
    )


SPEC = KernelSpec(
    name="splitkv_combine_rmsnorm_sigmoid_gate",
    axes={
        "num_tokens": VAR,
        "num_heads": CONST,
        "num_kv_heads": CONST,
        "qkvg_size": CONST,  # 2 * 64 * (num_heads + num_kv_heads)
        "attention_size": CONST,  # num_heads * 64
        "num_splits": VAR,
    },
    dtypes={},
    statics={"threads": (64, 128, 256, 512)},
    args=(
        Tensor("partial_max", BY_SPLIT, "float32", align=4),
        Tensor("partial_sum", BY_SPLIT, "float32", align=4),
        Tensor("partial_out", (*BY_SPLIT, HEAD_DIM), "float32"),
        Tensor("qkvg", ("num_tokens", "qkvg_size"), "bfloat16"),
        Tensor("out", ("num_tokens", "attention_size"), "bfloat16", role="out"),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Equals(
            "qkvg_size",
            f"{2 * HEAD_DIM} * (num_heads + num_kv_heads)",
            because="a token's row holds as many q as gate heads, k as v heads",
        ),
        Equals("attention_size", f"{HEAD_DIM} * num_heads", because="the output holds the heads side by side"),
        Divisible("num_heads", by="num_kv_heads", because="each KV head serves a group of query heads"),
        AtLeast("num_splits", 1, because="there is something to merge"),
        AtMost("num_splits", MAX_SPLITS, because="a warp holds the maxima and sums of all splits"),
    ),
    targets=TARGETS,
    kernel="kernel:splitkv_combine_rmsnorm_sigmoid_gate",
    reference="reference:splitkv_combine_rmsnorm_sigmoid_gate",
    triggers_early=True,
    cases=(
        *(_case(8, heads, splits) for heads in HEADS for splits in (1, 8, 64)),
        *(_case(num_tokens, (16, 2), splits) for num_tokens in (7, 56, 64) for splits in (1, 9)),
        *(_case(8, (16, 2), splits) for splits in (15, 16, 17, 63, 65, 66, 128, 129, 160)),
    ),
    instructions=("LDG", "MUFU", "SHFL", "ACQBULK"),
)


def serving(attention: "Attention", tp: int) -> Specialization:
    """What serves these heads, for any number of rows and splits."""
    sizes = _sizes(attention.query_heads(tp), attention.key_value_heads(tp))
    return SPEC.specialize(axes=sizes, statics={"threads": THREADS})


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """The backbone's and the draft's heads; equal shapes are shared."""
    found = (
        (attention.query_heads(deployment.tp), attention.key_value_heads(deployment.tp))
        for attention in (deployment.backbone.attention, deployment.draft.attention)
    )
    for heads in dict.fromkeys(found):
        yield SPEC.specialize(axes=_sizes(*heads), statics={"threads": THREADS})
