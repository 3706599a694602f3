"""The router's logits: logits[t, e] = sum over h of activation[t, h] * weight[e, h], BF16 times FP32 weights, FP32 out.

Every FP32 weight is the exact sum of three BF16 numbers (24 = 3 * 8 significant bits), and their products with BF16
activations are exact in FP32. So three BF16 MMAs give the exact products of the FP32 weight, and only the FP32 sums
round. (Two terms would leave a relative error of 2^-17 in each weight.) The sums run in a fixed order. A weight below
2^-110 keeps fewer bits: its last part is then below FP32's normal range.

K is split over the CTAs of a cluster. The output multiplier is folded into the weight when weights are loaded. The
weight is read before `griddepcontrol.wait`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Divisible, KernelSpec, Specialization, Static, Tensor
from jitspark.target import TARGETS
from kernel_specs.router_gemm.share import SLAB, SPLITS

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Backbone, Deployment

TOKEN_CLASSES = (8, 16, 32, 64)


def split(hidden_size: int, num_tokens: int) -> dict[str, Static]:
    """The bound that `num_tokens` falls under, and over how many CTAs K is split: as many as a cluster may hold."""
    return {
        "max_tokens": next(size for size in TOKEN_CLASSES if num_tokens <= size),
        "split": max((size for size in SPLITS if hidden_size % (size * SLAB) == 0), default=SPLITS[0]),
    }


def _case(num_tokens: int, num_experts: int, hidden_size: int) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, "num_experts": num_experts, "hidden_size": hidden_size},
        dtypes={},
        statics=split(hidden_size, num_tokens),
        rtol=1e-6,
        # Logits are of size 1; FP32 sums of 8192 products in this order err by some 1e-7, weights rounded to BF16 by
        # 2e-3, to TF32 by 3e-4, two BF16 terms instead of three by 4e-6.
        atol=1.5e-6,
        note="weights with all 24 bits, of very different size",
    )


SPEC = KernelSpec(
    name="router_gemm",
    axes={"num_tokens": VAR, "num_experts": CONST, "hidden_size": CONST},
    dtypes={},
    statics={
        "max_tokens": TOKEN_CLASSES,
        "split": SPLITS,  # CTAs of a cluster, each with its part of K
    },
    args=(
        Tensor("activation", ("num_tokens", "hidden_size"), "bfloat16"),
        Tensor("weight", ("num_experts", "hidden_size"), "float32"),
        Tensor("logits", ("num_tokens", "num_experts"), "float32", role="out", align=4),
    ),
    constraints=(
        AtMost("num_tokens", "max_tokens", because="a warp holds the sums of all tokens"),
        Divisible("hidden_size", by=f"{SLAB} * split", because="CTAs share K in stages of 256 columns"),
    ),
    targets=TARGETS,
    kernel="kernel:router_gemm",
    reference="reference:router_gemm",
    early_reads=("weight",),
    instructions=("UBLKCP", "HMMA", "PRMT", "STG"),
    cases=(
        *(_case(num_tokens, 256, 8192) for num_tokens in (1, 8, 9, 16, 32, 40, 56, 64)),
        *(_case(num_tokens, 8, 512) for num_tokens in (7, 8, 16, 64)),
        _case(24, 40, 2048),
    ),
)


def serving(backbone: "Backbone", num_tokens: int) -> Specialization:
    """What serves `num_tokens` rows of this backbone's router."""
    axes = {"num_experts": backbone.experts.num_local_experts, "hidden_size": backbone.hidden_size}
    return SPEC.specialize(axes=axes, statics=split(backbone.hidden_size, num_tokens))


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """The backbone's router, for each bound on the number of tokens."""
    for num_tokens in TOKEN_CLASSES:
        yield serving(deployment.backbone, num_tokens)
