"""The router's logits and the pooler's rows in one launch, as both are products of the same activations.

    logits[t, e] = sum over h of activation[t, h] * router[e, h]          exact products and FP32 sums, as `router_gemm`
    pooled[t, n] = BF16(sum over h of activation[t, h] * pooler[n, h])    FP32 sums

Some clusters have the router's rows, the others the pooler's, so that both share what each would spend alone behind
the launch before: activations from L2, products, an exchange. The sums run in a fixed order. Weights are read before
`griddepcontrol.wait`; the router's hold the output multiplier. `pooler` is a rank's shard of it, or at TP 1 all of it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Divisible, KernelSpec, Specialization, Static, Tensor
from jitspark.target import TARGETS
from kernel_specs.router_gemm.share import ROWS, SLAB, SPLITS
from kernel_specs.router_pooler_gemm.cut import BUDGET, RING_AND_RECEIVED, TOKEN_CLASSES

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

MAX_COLUMNS = 1024  # of K, of a CTA: they lie in shared memory whole
RESIDENT_CTAS = (
    376  # that an H200 holds at a time in clusters of 8: 47, by the time that launches of fewer clusters take
)


def statics(hidden_size: int, pooled_width: int, num_tokens: int) -> dict[str, Static]:
    """The statics for `num_tokens` (1 to 16) tokens."""
    return {
        "max_tokens": next(size for size in TOKEN_CLASSES if num_tokens <= size),
        "split": max((size for size in SPLITS if hidden_size % (size * SLAB) == 0), default=SPLITS[0]),
        "pooler_rows": 32 if pooled_width % 32 == 0 else 16,
    }


def _case(num_tokens: int, num_experts: int, hidden_size: int, pooled_width: int, note: str = "") -> Case:
    sizes = {"num_experts": num_experts, "hidden_size": hidden_size, "pooled_width": pooled_width}
    return Case(
        axes={"num_tokens": num_tokens, **sizes},
        dtypes={},
        statics=statics(hidden_size, pooled_width, num_tokens),
        # the logits' bounds are router_gemm's; pooled: one BF16 ulp, and FP32 sums of values near 1
        rtol=1e-6,
        atol=1.5e-6,
        tolerances={"pooled": (2**-7, 1e-4)},
        note=note,
    )


SPEC = KernelSpec(
    name="router_pooler_gemm",
    axes={
        "num_tokens": VAR,
        "num_experts": CONST,
        "hidden_size": CONST,
        "pooled_width": CONST,  # rows of this rank's share of the pooler
    },
    dtypes={},
    statics={
        "max_tokens": TOKEN_CLASSES,
        "split": SPLITS,  # CTAs of a cluster, each with its part of K
        "pooler_rows": (16, 32),  # of a CTA
    },
    args=(
        Tensor("activation", ("num_tokens", "hidden_size"), "bfloat16"),
        Tensor("router", ("num_experts", "hidden_size"), "float32"),
        Tensor("pooler", ("pooled_width", "hidden_size"), "bfloat16"),
        Tensor("logits", ("num_tokens", "num_experts"), "float32", role="out", align=4),
        Tensor("pooled", ("num_tokens", "pooled_width"), "bfloat16", role="out", align=2),
    ),
    constraints=(
        AtMost("num_tokens", "max_tokens", because="a warp holds the sums of all tokens"),
        Divisible("hidden_size", by=f"{SLAB} * split", because="CTAs share K in slabs of 256 columns"),
        Divisible("pooled_width", by="pooler_rows", because="a CTA multiplies whole row blocks of the MMA"),
        AtMost(RING_AND_RECEIVED, BUDGET, because="three CTAs share a multiprocessor's memory"),
    ),
    targets=TARGETS,
    kernel="kernel:router_pooler_gemm",
    reference="reference:router_pooler_gemm",
    early_reads=("router", "pooler"),
    triggers_early=True,
    instructions=("UBLKCP", "HMMA", "PRMT", "STG"),
    cases=(
        *(_case(num_tokens, 256, 8192, 512, "TP 8") for num_tokens in (1, 8, 9, 16)),
        *(_case(num_tokens, 256, 8192, width, "TP 16, 4") for num_tokens in (8, 16) for width in (256, 1024)),
        *(_case(num_tokens, 8, 512, 256, "tiny") for num_tokens in (7, 8, 16)),
        _case(11, 40, 2048, 48, "rows past the last expert"),
    ),
)


def serving(deployment: "Deployment", num_tokens: int) -> Specialization:
    """What serves `num_tokens` (1 to 16) rows of this backbone's routers and poolers."""
    backbone = deployment.backbone
    hidden, width = backbone.hidden_size, backbone.experts.moe_hidden_size // deployment.tp
    axes = {"num_experts": backbone.experts.num_local_experts, "hidden_size": hidden, "pooled_width": width}
    return SPEC.specialize(axes=axes, statics=statics(hidden, width, num_tokens))


def serves(deployment: "Deployment", num_tokens: int) -> bool:
    """Whether one launch is the better choice: few rows, and clusters that all run at a time (TP 4 has one more)."""
    backbone = deployment.backbone
    hidden, width = backbone.hidden_size, backbone.experts.moe_hidden_size // deployment.tp
    if num_tokens > max(TOKEN_CLASSES) or hidden % (2 * SLAB) != 0 or width % ROWS != 0:
        return False
    chosen = statics(hidden, width, num_tokens)
    split, pooler_rows = int(chosen["split"]), int(chosen["pooler_rows"])
    clusters = -(-backbone.experts.num_local_experts // ROWS) + width // pooler_rows
    return hidden <= MAX_COLUMNS * split and clusters * split <= RESIDENT_CTAS


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """For each bound on the number of tokens that it serves."""
    for num_tokens in TOKEN_CLASSES:
        if serves(deployment, num_tokens):
            yield serving(deployment, num_tokens)
