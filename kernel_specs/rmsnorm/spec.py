"""RMSNorm of whole rows: where no residual boundary precedes the norm.

    x   <- x                                           `round_input`: rounded to BF16 first, as the draft does
    out <- BF16(x * rsqrt(mean(x^2) + eps) * (weight + gain_center))

FP32 inside, one rounding at the store. Without a weight the last factor is 1.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jitspark.spec import CONST, VAR, Case, Divisible, Equals, KernelSpec, Scalar, Specialization, Tensor
from jitspark.target import TARGETS
from kernel_specs.primitives.row_split import CLUSTERS, THREADS, TOKEN_CLASSES, VECTOR, row_split

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

TOKENS_BY_HIDDEN = ("num_tokens", "hidden_size")

# input dtype, weighted, gain center, input rounded to BF16 first
TOKEN_EMBEDDING = ("bfloat16", False, 0.0, False)
PRE_NORM = ("bfloat16", True, 1.0, False)  # pre-expert norm; the draft's norms of context rows
PRE_NORM_OF_STREAM = ("float32", True, 1.0, False)
FINAL_NORM_OF_STREAM = ("float32", True, 0.0, False)
DRAFT_PRE_NORM_OF_STREAM = ("float32", True, 1.0, True)
DRAFT_FINAL_NORM_OF_STREAM = ("float32", True, 0.0, True)
VARIANTS = (
    TOKEN_EMBEDDING,
    PRE_NORM,
    PRE_NORM_OF_STREAM,
    FINAL_NORM_OF_STREAM,
    DRAFT_PRE_NORM_OF_STREAM,
    DRAFT_FINAL_NORM_OF_STREAM,
)

Variant = tuple[str, bool, float, bool]


def choices(hidden_size: int, num_tokens: int, variant: Variant) -> dict[str, Any]:
    """Dtypes and statics of a variant, with its rows split as suits so many of them."""
    input_dtype, weighted, gain_center, round_input = variant
    statics = {"weighted": weighted, "gain_center": gain_center, "round_input": round_input}
    return {"dtypes": {"input_dtype": input_dtype}, "statics": statics | row_split(hidden_size, num_tokens)}


def _case(num_tokens: int, hidden_size: int, variant: Variant) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, "hidden_size": hidden_size},
        **choices(hidden_size, num_tokens, variant),
        rtol=2**-7,  # one BF16 ulp
        atol=0.0,
        note="rows of zeros, of 1e15 and of 1e-20 among ordinary ones",
    )


SPEC = KernelSpec(
    name="rmsnorm",
    axes={"num_tokens": VAR, "hidden_size": CONST},
    dtypes={"input_dtype": ("float32", "bfloat16")},
    statics={
        "weighted": (False, True),
        "gain_center": (0.0, 1.0),  # 1.0 where the checkpoint stores the gain minus one
        "round_input": (False, True),
        "threads": THREADS,  # per CTA
        "cluster": CLUSTERS,  # CTAs per token
    },
    args=(
        Tensor("x", TOKENS_BY_HIDDEN, "input_dtype"),
        Tensor("weight", ("hidden_size",), "bfloat16", when=("weighted", True)),
        Tensor("out", TOKENS_BY_HIDDEN, "bfloat16", role="out"),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Divisible("hidden_size", by=32 * VECTOR, because="every lane of a warp owns one 16-byte vector of BF16"),
        Equals("hidden_size", f"{VECTOR} * threads * cluster", because="each thread of a row has a vector of it"),
    ),
    targets=TARGETS,
    kernel="kernel:rmsnorm",
    reference="reference:rmsnorm",
    early_reads=("weight",),
    instructions=(
        "LDG.E.128",
        "STAS",
        "ACQBULK",
        "PREEXIT",
    ),  # 16-byte loads, sums over a cluster, PDL
    cases=(
        *(_case(num_tokens, 8192, variant) for num_tokens in (1, 8, 56) for variant in VARIANTS),
        *(_case(num_tokens, hidden_size, PRE_NORM) for num_tokens in (7, 64) for hidden_size in (256, 512, 4096, 8192)),
        *(_case(7, 512, variant) for variant in VARIANTS if variant is not PRE_NORM),
    ),
)


def serving(hidden_size: int, num_tokens: int, variant: Variant) -> Specialization:
    """What serves this norm for `num_tokens` rows."""
    return SPEC.specialize(axes={"hidden_size": hidden_size}, **choices(hidden_size, num_tokens, variant))


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Every norm that the decode step of this deployment can ask for outside a fused boundary."""
    backbone, draft = deployment.backbone, deployment.draft
    asked = (
        (backbone.hidden_size, TOKEN_EMBEDDING),
        (backbone.hidden_size, PRE_NORM_OF_STREAM),  # layer 0
        (backbone.experts.moe_hidden_size, PRE_NORM),  # pre-expert norm
        (backbone.hidden_size, FINAL_NORM_OF_STREAM),
        (draft.hidden_size, PRE_NORM),  # context rows: hidden_norm, then each layer's pre norm
        (draft.hidden_size, DRAFT_PRE_NORM_OF_STREAM),  # layer 0
        (draft.hidden_size, DRAFT_FINAL_NORM_OF_STREAM),
    )
    for hidden_size, variant in dict.fromkeys(asked):
        found = (serving(hidden_size, num_tokens, variant) for num_tokens in TOKEN_CLASSES)
        yield from {tuple(each.statics.items()): each for each in found}.values()
