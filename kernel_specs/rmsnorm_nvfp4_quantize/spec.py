"""The pre-expert norm and its quantization to NVFP4, in one launch.

    n  <- BF16(x * rsqrt(mean(x^2) + eps) * (weight + 1))
    of every 16 neighbouring columns:
    s  <- E4M3(g * (amax * (1/6)))                 to nearest even, saturating at 448; amax the largest |n|
    q  <- E2M1(n * rcp(s * rcp(g)))                to nearest even, saturating at 6; n * 0 where s is 0

FP32 inside, each operation rounded on its own; 1/6 is the FP32 number nearest to it, and rcp is the correctly rounded
FP32 reciprocal. So the bytes are reproducible everywhere. (Implementations with an approximate reciprocal differ by one
code where a quotient falls next to a tie.) A code keeps the sign of n, also where it is zero.

g = `global_scale[0]`, 1 / the activation's checkpoint scale, is a tensor of one element and not a scalar: a captured
graph then stays right when weights are loaded anew in place, and binding needs no copy to the host. It is a weight, and
is read before `griddepcontrol.wait`.

`codes[t, i]` holds column 2i in its low four bits and column 2i + 1 in its high ones. `scales[t, b]` is the E4M3 byte
of columns 16 b to 16 b + 15: rows as they are, not interleaved.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, Case, Divisible, Equals, KernelSpec, Scalar, Specialization, Tensor
from jitspark.target import TARGETS
from kernel_specs.primitives.row_split import CLUSTERS, THREADS, TOKEN_CLASSES, VECTOR, row_split

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

BLOCK = 16  # columns that share a scale


def _axes(hidden_size: int) -> dict[str, int]:
    return {"hidden_size": hidden_size, "packed_size": hidden_size // 2, "num_blocks": hidden_size // BLOCK}


def _case(num_tokens: int, hidden_size: int) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, **_axes(hidden_size)},
        dtypes={},
        statics=row_split(hidden_size, num_tokens),
        rtol=0.0,
        atol=0.0,
        note="exact ties of E2M1 and E4M3, saturation of both, scales that vanish, rows of zeros",
    )


SPEC = KernelSpec(
    name="rmsnorm_nvfp4_quantize",
    axes={
        "num_tokens": VAR,
        "hidden_size": CONST,
        "packed_size": CONST,  # hidden_size / 2
        "num_blocks": CONST,  # hidden_size / 16
    },
    dtypes={},
    statics={
        "threads": THREADS,  # per CTA
        "cluster": CLUSTERS,  # CTAs per token
    },
    args=(
        Tensor("x", ("num_tokens", "hidden_size"), "bfloat16"),
        Tensor("weight", ("hidden_size",), "bfloat16"),
        Tensor("global_scale", (1,), "float32", align=4),
        Tensor("codes", ("num_tokens", "packed_size"), "uint8", role="out"),
        Tensor("scales", ("num_tokens", "num_blocks"), "uint8", role="out"),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Divisible("hidden_size", by=32 * VECTOR, because="every lane of a warp owns one 16-byte vector of BF16"),
        Equals("hidden_size", f"{VECTOR} * threads * cluster", because="each thread of a row has a vector of it"),
        Equals("hidden_size", "2 * packed_size", because="a byte holds two columns"),
        Equals("hidden_size", "16 * num_blocks", because="a scale serves 16 columns"),
    ),
    targets=TARGETS,
    kernel="kernel:rmsnorm_nvfp4_quantize",
    reference="reference:rmsnorm_nvfp4_quantize",
    early_reads=("weight", "global_scale"),
    instructions=("LDG", "MUFU", "SHFL", "F2FP", "STG"),
    cases=tuple(_case(num_tokens, hidden_size) for hidden_size in (4096, 256) for num_tokens in (1, 7, 8, 16, 64)),
)


def serving(hidden_size: int, num_tokens: int) -> Specialization:
    """What serves `num_tokens` rows of this size."""
    return SPEC.specialize(axes=_axes(hidden_size), statics=row_split(hidden_size, num_tokens))


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """The input of the experts, for few tokens and for many."""
    hidden_size = deployment.backbone.experts.moe_hidden_size
    found = (serving(hidden_size, num_tokens) for num_tokens in TOKEN_CLASSES)
    yield from {tuple(each.statics.items()): each for each in found}.values()
