"""The first grouped GEMM of NVFP4 experts, SwiGLU, and the quantization of what comes out, in one launch.

For each route r = token * num_experts_per_tok + slot that the schedule gives to a local expert e, and each of the
expert's outputs n of this rank (whole experts, or a slice of each):

    G <- sum over k of a[token, k] * W1[e, n, k]      U likewise with W3; a and W are E2M1 * E4M3, FP32 sums
    g <- G * gate_up_scales[e, 0]                     u <- U * gate_up_scales[e, 1]
    h <- g * sigmoid(g) * u                           FP32; sigmoid of g below -87 counts as that of -87
    of every 16 neighbouring outputs:
    s <- E4M3(global_scale * (amax * (1/6)))          to nearest even, saturating at 448; amax the largest |h|
    q <- E2M1(h * rcp(s * rcp(global_scale)))         to nearest even, saturating at 6; h * 0 where s is 0

gate_up_scales[e] = (a13 * s13[e, 0], a13 * s13[e, 1]), multiplied at load in FP32: the checkpoint's input scale and
the two weight scales. global_scale[0] = 1 / a2. 1/6 and rcp are as in `rmsnorm_nvfp4_quantize`, and so are the layouts
of codes and scales, coming and going: rows as they are.

Exact: every operand in FP16, hence every product, and the sums wherever all partial sums fit 24 bits; else FP32 sums
in a fixed order: K in ranges, even and odd k16 steps each in order, ranges added in order. Same input, same bits.
Codes and scales then are reproducible but where h falls within FP32 rounding next to a tie of E2M1 or E4M3; there they
differ by one code between implementations. A case demands equal bytes: its inputs have exact sums, and h clear of ties
by several times what FP32 loses behind the sums (the reference's `random_arguments` sees to it).

Rows of routes that no local expert has (padding, or another rank's expert) are not written. A weight is read once per
active expert, in a layout that is this kernel's own (`layout.repack_gate_up`). Nothing else of an expert without routes
is read. Local are the experts `first_expert` to `first_expert + num_local_experts - 1`; all of them with a slice each.

The schedule is `sigmoid_bias_topk_routing`'s: experts in ascending order, -1 behind the last one. It and all weights
are read before `griddepcontrol.wait`: the schedule must be complete before the launch that precedes this one (the norm
that quantizes, say), which must trigger its dependents after its own wait. This launch does so too, hence the second
GEMM may read the schedule early as well.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import (
    CONST,
    VAR,
    AtMost,
    Case,
    Divisible,
    Equals,
    KernelSpec,
    Scalar,
    Specialization,
    Static,
    Tensor,
)
from jitspark.target import TARGETS
from kernel_specs.primitives.nvfp4_tiling import (
    BLOCK,
    COLUMN_UNIT,
    GROUPS,
    MAX_RANGES,
    TILE_ROWS,
    split_columns,
)

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment, Experts

MAX_TOKENS = 64
WARPS = 8  # of a CTA, unless K has more ranges
LOCAL = "num_local_experts"


def const_axes(hidden: int, width: int, num_experts_per_tok: int) -> dict[str, int]:
    """The CONST axes; `width` is how many outputs of an expert this rank has."""
    return {
        "moe_hidden_size": hidden,
        "packed_hidden": hidden // 2,
        "hidden_blocks": hidden // BLOCK,
        "packed_width": width // 2,
        "width_blocks": width // BLOCK,
        "expert_code_bytes": width * hidden,  # two matrices, half a byte per code
        "expert_scale_bytes": 2 * width * hidden // BLOCK,
        "num_experts_per_tok": num_experts_per_tok,
    }


def statics(moe_hidden_size: int) -> dict[str, Static]:
    """Two CTAs of eight warps a multiprocessor: four warps a scheduler hide each other's latencies (NOTES.md)."""
    split = split_columns(moe_hidden_size)
    row_warps = next((n for n in (8, 4, 2) if n * split["ranges"] <= WARPS), 1)
    return {**split, "row_warps": row_warps, "stages": 2, "ctas": 264}


def _case(num_tokens: int, sizes: tuple[int, int, int], experts: tuple[int, int], note: str) -> Case:
    num_experts, num_local_experts = experts
    var = {
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "num_offsets": num_experts + 1,
        "num_local_experts": num_local_experts,
    }
    return Case(
        axes={**var, **const_axes(*sizes)},
        dtypes={},
        statics=statics(sizes[0]),
        rtol=0.0,
        atol=0.0,
        note=f"{note}; NaN in experts without routes, scales of 0, saturation",
    )


TINY, TINY_SHARD = (256, 256, 2), (256, 128, 2)
TP4, TP8, TP16 = (4096, 1024, 8), (4096, 512, 8), (4096, 256, 8)

CASES = (
    *(_case(tokens, TINY, (8, 8), "tiny") for tokens in (1, 7, 8, 16, 64)),
    *(_case(tokens, TINY_SHARD, (8, 8), "tiny, a slice") for tokens in (8, 40)),
    *(_case(tokens, TINY, (8, 4), "tiny, whole experts, half of them local") for tokens in (8, 64)),
    *(_case(tokens, (256, 256, 1), (1, 1), "one expert has all rows") for tokens in (1, 8, 9, 64)),
    _case(8, (256, 256, 2), (16, 16), "every route its own expert"),
    *(_case(tokens, (256, 256, 2), (16, 2), "no expert is local") for tokens in (8, 64)),
    _case(8, (512, 48, 4), (8, 8), "three tiles"),
    _case(9, (384, 64, 4), (8, 8), "three ranges"),
    *(_case(tokens, TP8, (16, 16), "TP 8") for tokens in (8, 16, 32, 64)),
    *(_case(tokens, TP4, (12, 12), "TP 4") for tokens in (8, 64)),
    *(_case(tokens, TP16, (16, 16), "TP 16") for tokens in (8, 64)),
    _case(8, (4096, 512, 1), (8, 8), "TP 8, every route its own expert"),
    _case(64, (4096, 512, 1), (1, 1), "TP 8, one expert has all rows"),
    _case(8, (4096, 4096, 4), (6, 2), "whole experts"),
)

SPEC = KernelSpec(
    name="nvfp4_grouped_gemm_swiglu",
    axes={
        "num_tokens": VAR,
        "num_experts": VAR,
        "num_offsets": VAR,  # num_experts + 1
        "num_local_experts": VAR,
        "moe_hidden_size": CONST,
        "packed_hidden": CONST,  # moe_hidden_size / 2
        "hidden_blocks": CONST,  # moe_hidden_size / 16
        "packed_width": CONST,  # outputs of an expert / 2
        "width_blocks": CONST,  # outputs of an expert / 16
        "expert_code_bytes": CONST,
        "expert_scale_bytes": CONST,
        "num_experts_per_tok": CONST,
    },
    dtypes={},
    statics={
        "groups": GROUPS,  # 64 columns each, of a warp's range
        "ranges": tuple(range(1, MAX_RANGES + 1)),  # warps that share K
        "row_warps": (1, 2, 4, 8),  # streams of a CTA
        "stages": (2, 4, 6, 8),  # row tiles of a warp's ring; a gate and an up tile go together
        "ctas": (132, 264),
    },
    args=(
        Tensor("codes", ("num_tokens", "packed_hidden"), "uint8"),
        Tensor("scales", ("num_tokens", "hidden_blocks"), "uint8"),
        Tensor("weight", (LOCAL, "expert_code_bytes"), "uint8"),
        Tensor("weight_scales", (LOCAL, "expert_scale_bytes"), "uint8"),
        Tensor("gate_up_scales", (LOCAL, 2), "float32", align=4),
        Tensor("global_scale", (1,), "float32", align=4),
        Tensor("expert_ids", ("num_experts",), "int32", align=4),
        Tensor("route_offsets", ("num_offsets",), "int32", align=4),
        Tensor("routes", ("num_tokens", "num_experts_per_tok"), "int32", align=4),
        Tensor("out_codes", ("num_tokens", "num_experts_per_tok", "packed_width"), "uint8", role="out"),
        Tensor("out_scales", ("num_tokens", "num_experts_per_tok", "width_blocks"), "uint8", role="out"),
        Scalar("first_expert", "int32"),
    ),
    constraints=(
        AtMost("num_tokens", MAX_TOKENS, because="this is a kernel of the decode step"),
        Divisible("moe_hidden_size", by=COLUMN_UNIT, because="a lane owns two scale blocks of a row at least"),
        Divisible("packed_width", by=TILE_ROWS // 2, because="16 outputs make a tile, and a scale block"),
        Equals("num_offsets", "num_experts + 1", because="every expert's routes begin and end somewhere"),
        Equals("moe_hidden_size", "64 * ranges * groups", because="a warp per range has all of a row's columns"),
        Equals("moe_hidden_size", "2 * packed_hidden", because="a byte holds two columns"),
        Equals("moe_hidden_size", "16 * hidden_blocks", because="a scale serves 16 columns"),
        Equals("packed_width", "8 * width_blocks", because="a scale serves 16 outputs, a byte holds two"),
        Equals("expert_code_bytes", "4 * packed_width * packed_hidden", because="an output has a gate and an up row"),
        Equals("expert_scale_bytes", "4 * packed_width * hidden_blocks", because="16 weights share a scale"),
    ),
    targets=TARGETS,
    kernel="kernel:nvfp4_grouped_gemm_swiglu",
    reference="reference:nvfp4_grouped_gemm_swiglu",
    early_reads=("weight", "weight_scales", "gate_up_scales", "global_scale", "expert_ids", "route_offsets", "routes"),
    partial_outputs=("out_codes", "out_scales"),
    instructions=(
        "UBLKCP",
        "FENCE.VIEW.ASYNC",
        "LDG.E.128",
        "HMMA.16816.F32",
        "HMUL2",
        "F2FP",
        "MUFU",
        "ACQBULK",
        "PREEXIT",
    ),
    cases=CASES,
)


def serving(experts: "Experts", width: int) -> Specialization:
    """What serves experts of which this rank has `width` outputs each, for any number of rows."""
    hidden = experts.moe_hidden_size
    return SPEC.specialize(axes=const_axes(hidden, width, experts.num_experts_per_tok), statics=statics(hidden))


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """A slice of every expert, and whole experts."""
    experts = deployment.backbone.experts
    for width in dict.fromkeys((experts.intermediate_width(deployment.tp), experts.moe_intermediate_size)):
        yield serving(experts, width)
