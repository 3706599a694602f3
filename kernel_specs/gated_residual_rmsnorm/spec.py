"""Post norm, gated residual and the next layer's pre norm in one launch, at every boundary between two branches.

    z      <- branch                                        post_norm "weightless"
              branch * (post_weight + 1)                    post_norm "input_scale"
    y      <- z * rsqrt(mean(z^2) + post_eps)               mode "draft": rounded to BF16
    stream <- alpha * stream + beta * y                     FP32, in place; `tap` gets a copy of it
    x      <- stream                                        mode "draft": rounded to BF16
    n      <- x * rsqrt(mean(x^2) + eps) * (weight + gain_center)
    activation <- BF16(n), router_input <- n

FP32 inside; the roundings named here are the only ones. A tensor that a static switches off is no argument at all.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jitspark.spec import CONST, VAR, Case, Divisible, Equals, KernelSpec, Scalar, Specialization, Static, Tensor
from jitspark.target import TARGETS
from kernel_specs.primitives.row_split import CLUSTERS, THREADS, TOKEN_CLASSES, VECTOR, row_split

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

TOKENS_BY_HIDDEN = ("num_tokens", "hidden_size")
PER_CHANNEL = ("hidden_size",)


Boundary = dict[str, Static]


def statics(hidden_size: int, num_tokens: int, boundary: Boundary) -> dict[str, Static]:
    """All statics for a boundary: what it computes, and how rows are split when there are so many of them."""
    return {**boundary, **row_split(hidden_size, num_tokens)}


def boundary_of(
    mode: str, post_norm: str, *, gain_center: float = 1.0, tap: bool = False, router: bool = False
) -> Boundary:
    """What a boundary computes, as statics."""
    return {
        "mode": mode,
        "post_norm": post_norm,
        "gain_center": gain_center,
        "write_tap": tap,
        "write_router_input": router,
    }


def backbone_boundaries(num_layers: int, tap_layers: tuple[int, ...]) -> Iterator[Boundary]:
    """Into a feed-forward part; out of it into the next layer; out of the last one into the final norm."""
    last = num_layers - 1
    for router in (False, True):  # the FP32 router input is a choice of the deployment
        yield boundary_of("backbone", "weightless", router=router)
    for tap in sorted({layer in tap_layers for layer in range(last)}):
        yield boundary_of("backbone", "input_scale", tap=tap)
    yield boundary_of("backbone", "input_scale", gain_center=0.0, tap=last in tap_layers)


def draft_boundaries() -> Iterator[Boundary]:
    """As in the backbone; the draft has neither taps nor a router."""
    yield boundary_of("draft", "weightless")
    yield boundary_of("draft", "input_scale")
    yield boundary_of("draft", "input_scale", gain_center=0.0)


def _case(num_tokens: int, hidden_size: int, boundary: Boundary) -> Case:
    bounds: dict[str, Any]
    if boundary["mode"] == "draft":
        # y is rounded in the middle: where FP32 and float64 fall on two sides of a tie, the stream moves by an ulp of
        # y (2^-5 for |y| < 8), and what follows moves with it.
        bounds = {"rtol": 2**-6, "atol": 2**-4, "tolerances": {"stream": (2**-7, 2**-5)}}
    else:
        single = (4e-6, 1e-5)  # FP32 rounding, and its remains where alpha * stream and beta * y cancel
        bounds = {"rtol": 2**-7, "atol": 1e-5, "tolerances": dict.fromkeys(("stream", "tap", "router_input"), single)}
    return Case(
        axes={"num_tokens": num_tokens, "hidden_size": hidden_size},
        dtypes={},
        statics=statics(hidden_size, num_tokens, boundary),
        note="rows whose branch, stream or both are zero, huge or tiny",
        **bounds,
    )


SPEC = KernelSpec(
    name="gated_residual_rmsnorm",
    axes={"num_tokens": VAR, "hidden_size": CONST},
    dtypes={},
    statics={
        "mode": ("backbone", "draft"),
        "post_norm": ("weightless", "input_scale"),
        "gain_center": (0.0, 1.0),  # 1.0 where the checkpoint stores the gain minus one
        "write_tap": (False, True),
        "write_router_input": (False, True),
        "threads": THREADS,  # per CTA
        "cluster": CLUSTERS,  # CTAs per token
    },
    args=(
        Tensor("branch", TOKENS_BY_HIDDEN, "bfloat16"),
        Tensor("stream", TOKENS_BY_HIDDEN, "float32", role="inout"),
        Tensor("post_weight", PER_CHANNEL, "bfloat16", when=("post_norm", "input_scale")),
        Tensor("alpha", PER_CHANNEL, "float32"),
        Tensor("beta", PER_CHANNEL, "float32"),
        Tensor("weight", PER_CHANNEL, "bfloat16"),
        Tensor("activation", TOKENS_BY_HIDDEN, "bfloat16", role="out"),
        Tensor("tap", TOKENS_BY_HIDDEN, "float32", role="out", when=("write_tap", True)),
        Tensor("router_input", TOKENS_BY_HIDDEN, "float32", role="out", when=("write_router_input", True)),
        Scalar("post_eps", "float32"),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Divisible("hidden_size", by=32 * VECTOR, because="every lane of a warp owns one 16-byte vector of BF16"),
        Equals("hidden_size", f"{VECTOR} * threads * cluster", because="each thread of a row has a vector of it"),
    ),
    targets=TARGETS,
    kernel="kernel:gated_residual_rmsnorm",
    reference="reference:gated_residual_rmsnorm",
    early_reads=("post_weight", "alpha", "beta", "weight"),
    instructions=("LDG.E.128", "STG.E.128", "STAS", "ACQBULK", "PREEXIT"),  # as rmsnorm, and 16-byte stores
    cases=tuple(
        _case(num_tokens, hidden_size, boundary)
        for hidden_size, token_counts in ((8192, (1, 8, 56, 64)), (512, (7,)))
        for num_tokens in token_counts
        for boundary in (*backbone_boundaries(3, (0, 2)), *draft_boundaries())
    ),
)


def serving(hidden_size: int, num_tokens: int, boundary: Boundary) -> Specialization:
    """What serves this boundary for `num_tokens` rows."""
    return SPEC.specialize(axes={"hidden_size": hidden_size}, statics=statics(hidden_size, num_tokens, boundary))


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Every boundary of the backbone and of the draft."""
    backbone, draft = deployment.backbone, deployment.draft
    asked = (
        *(
            (backbone.hidden_size, each)
            for each in backbone_boundaries(backbone.num_hidden_layers, backbone.tap_layers)
        ),
        *((draft.hidden_size, each) for each in draft_boundaries()),
    )
    for hidden_size, boundary in asked:
        found = (serving(hidden_size, num_tokens, boundary) for num_tokens in TOKEN_CLASSES)
        yield from {tuple(each.statics.items()): each for each in found}.values()
