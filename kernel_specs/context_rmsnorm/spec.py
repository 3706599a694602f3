"""The two norms between the draft's fc and its K/V projections, for all layers in one launch.

    x      <- BF16(context * rsqrt(mean(context^2) + eps) * (weight + gain_center))          hidden_norm
    out_l  <- BF16(x * rsqrt(mean(x^2) + eps) * (layer_weights_l + gain_center))             layer l's pre norm

FP32 inside; the two roundings are the only ones. x's mean square is the same for every layer, so a row costs two sums
however many layers there are.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, Case, Divisible, Equals, KernelSpec, Scalar, Specialization, Tensor
from jitspark.target import TARGETS
from kernel_specs.primitives.row_split import CLUSTERS, THREADS, TOKEN_CLASSES, VECTOR, row_split

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment


def _case(num_tokens: int, hidden_size: int, num_layers: int, gain_center: float) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, "hidden_size": hidden_size, "num_layers": num_layers},
        dtypes={},
        statics={"gain_center": gain_center, **row_split(hidden_size, num_tokens)},
        # x is rounded in the middle: where FP32 and float64 fall on two sides of a tie, out moves by an ulp of x
        rtol=2**-6,
        atol=0.0,
        note="rows of zeros, of 1e15 and of 1e-20 among ordinary ones",
    )


SPEC = KernelSpec(
    name="context_rmsnorm",
    axes={"num_tokens": VAR, "hidden_size": CONST, "num_layers": CONST},
    dtypes={},
    statics={
        "gain_center": (0.0, 1.0),  # 1.0 where the checkpoint stores the gain minus one
        "threads": THREADS,  # per CTA
        "cluster": CLUSTERS,  # CTAs per token
    },
    args=(
        Tensor("context", ("num_tokens", "hidden_size"), "bfloat16"),
        Tensor("weight", ("hidden_size",), "bfloat16"),
        Tensor("layer_weights", ("num_layers", "hidden_size"), "bfloat16"),
        Tensor("out", ("num_layers", "num_tokens", "hidden_size"), "bfloat16", role="out"),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Divisible("hidden_size", by=32 * VECTOR, because="every lane of a warp owns one 16-byte vector of BF16"),
        Equals("hidden_size", f"{VECTOR} * threads * cluster", because="each thread of a row has a vector of it"),
    ),
    targets=TARGETS,
    kernel="kernel:context_rmsnorm",
    reference="reference:context_rmsnorm",
    early_reads=("weight", "layer_weights"),
    instructions=("LDG.E.128", "STG.E.128", "STAS", "ACQBULK", "PREEXIT"),  # 16-byte accesses, cluster sums, PDL
    cases=(
        *(_case(num_tokens, 8192, 5, 1.0) for num_tokens in (1, 8, 16, 64)),
        *(_case(num_tokens, 512, 2, gain) for num_tokens in (8, 40) for gain in (0.0, 1.0)),
        _case(8, 8192, 5, 0.0),
    ),
)


def serving(hidden_size: int, num_layers: int, num_tokens: int) -> Specialization:
    """What serves `num_tokens` context rows of a draft of so many layers."""
    statics = {"gain_center": 1.0, **row_split(hidden_size, num_tokens)}
    return SPEC.specialize(axes={"hidden_size": hidden_size, "num_layers": num_layers}, statics=statics)


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Few and many rows."""
    draft = deployment.draft
    found = (serving(draft.hidden_size, draft.num_hidden_layers, num_tokens) for num_tokens in TOKEN_CLASSES)
    yield from {tuple(each.statics.items()): each for each in found}.values()
