"""The second grouped GEMM of NVFP4 experts: a row per route, whole or one rank's part of it.

For each route r that the schedule gives to a local expert e, and each column n of the experts' width:

    rows[r, n] <- (sum over i of h[r, i] * W2[e, n, i]) * down_scales[e]        h and W2 are E2M1 * E4M3, FP32 sums

over all outputs i of the first GEMM that this rank has: a slice of every expert (then the rows of all ranks are to be
added up, before the norm that follows) or whole experts. The seam: rows are FP32, or rounded to BF16 once. Whoever
adds up partial rows (`expert_combine_rmsnorm`) does so in FP32. down_scales[e] = a2 * s2[e], multiplied at load in
FP32.

Exact: every operand in FP16, hence every product, and the sums wherever all partial sums fit 24 bits; else FP32 sums
in a fixed order (ranges of K, even and odd k16 steps each in order, ranges added in order). Same input, same bits.

Rows of routes that no local expert has (padding, or another rank's expert) are not written. A weight is read once per
active expert, in a layout of our own (`layout.repack_down`). `codes` and `scales` are what `nvfp4_grouped_gemm_swiglu`
writes; rows of other routes are not read.

The schedule is `sigmoid_bias_topk_routing`'s: experts in ascending order, -1 behind the last one. It and all weights
are read before `griddepcontrol.wait`: the schedule must be complete before the launch that precedes this one (the first
GEMM), which must trigger its dependents after its own wait, as this launch does too.
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


def split(columns: int, moe_hidden_size: int) -> dict[str, Static]:
    """Two CTAs of eight warps a multiprocessor: four warps a scheduler hide each other's latencies."""
    assert moe_hidden_size % TILE_ROWS == 0
    ranges = split_columns(columns)
    row_warps = next((n for n in (8, 4, 2) if n * ranges["ranges"] <= WARPS), 1)
    return {**ranges, "row_warps": row_warps, "stages": 2, "ctas": 264}


def const_axes(hidden: int, width: int, num_experts_per_tok: int) -> dict[str, int]:
    """The CONST axes; `width` is how many of an expert's inner columns this rank has."""
    return {
        "moe_hidden_size": hidden,
        "packed_width": width // 2,
        "width_blocks": width // BLOCK,
        "expert_code_bytes": hidden * width // 2,
        "expert_scale_bytes": hidden * width // BLOCK,
        "num_experts_per_tok": num_experts_per_tok,
    }


def _case(num_tokens: int, sizes: tuple[int, int, int], experts: tuple[int, int], rows: str, note: str) -> Case:
    num_experts, num_local_experts = experts
    var = {
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "num_offsets": num_experts + 1,
        "num_local_experts": num_local_experts,
    }
    return Case(
        axes={**var, **const_axes(*sizes)},
        dtypes={"rows_dtype": rows},
        statics=split(sizes[1], sizes[0]),
        # exact sums near 1 and one FP32 rounding, held to ten; or one BF16 ulp
        rtol=6e-7 if rows == "float32" else 2**-7,
        atol=1e-6,
        note=f"{note}; NaN in experts without routes and rows that are not read, scales of 0",
    )


def _cases(tokens: tuple[int, ...], sizes: tuple[int, int, int], experts: tuple[int, int], note: str) -> list[Case]:
    return [_case(each, sizes, experts, rows, note) for each in tokens for rows in ("float32", "bfloat16")]


CASES = (
    *_cases((1, 7, 8, 16, 64), (256, 256, 2), (8, 8), "tiny"),
    *_cases((8, 40), (256, 128, 2), (8, 8), "tiny, a slice"),
    *_cases((8, 64), (256, 256, 2), (8, 4), "tiny, whole experts, half of them local"),
    *_cases((1, 8, 9, 64), (256, 256, 1), (1, 1), "one expert has all rows"),
    *_cases((8,), (256, 256, 2), (16, 16), "every route its own expert"),
    *_cases((8, 64), (256, 256, 2), (16, 2), "no expert is local"),
    *_cases((9,), (48, 384, 4), (8, 8), "three tiles, three ranges"),
    *_cases((8, 16, 32, 64), (4096, 512, 8), (16, 16), "TP 8"),
    *_cases((8, 64), (4096, 1024, 8), (12, 12), "TP 4"),
    *_cases((8, 64), (4096, 256, 8), (16, 16), "TP 16"),
    *_cases((8,), (4096, 512, 1), (8, 8), "TP 8, every route its own expert"),
    *_cases((64,), (4096, 512, 1), (1, 1), "TP 8, one expert has all rows"),
    *_cases((8,), (4096, 4096, 4), (6, 2), "whole experts"),
)

SPEC = KernelSpec(
    name="nvfp4_grouped_gemm_partial",
    axes={
        "num_tokens": VAR,
        "num_experts": VAR,
        "num_offsets": VAR,  # num_experts + 1
        "num_local_experts": VAR,
        "moe_hidden_size": CONST,
        "packed_width": CONST,  # inner columns of an expert / 2
        "width_blocks": CONST,  # inner columns of an expert / 16
        "expert_code_bytes": CONST,
        "expert_scale_bytes": CONST,
        "num_experts_per_tok": CONST,
    },
    dtypes={"rows_dtype": ("float32", "bfloat16")},
    statics={
        "groups": GROUPS,  # 64 columns each, of a warp's range
        "ranges": tuple(range(1, MAX_RANGES + 1)),  # of K, which as many warps share
        "row_warps": (1, 2, 4, 8),  # streams of a CTA
        "stages": (2, 4, 6, 8),  # row tiles of a warp's ring
        "ctas": (132, 264),
    },
    args=(
        Tensor("codes", ("num_tokens", "num_experts_per_tok", "packed_width"), "uint8"),
        Tensor("scales", ("num_tokens", "num_experts_per_tok", "width_blocks"), "uint8"),
        Tensor("weight", (LOCAL, "expert_code_bytes"), "uint8"),
        Tensor("weight_scales", (LOCAL, "expert_scale_bytes"), "uint8"),
        Tensor("down_scales", (LOCAL,), "float32", align=4),
        Tensor("expert_ids", ("num_experts",), "int32", align=4),
        Tensor("route_offsets", ("num_offsets",), "int32", align=4),
        Tensor("routes", ("num_tokens", "num_experts_per_tok"), "int32", align=4),
        # inout: rows of other routes stay what they are
        Tensor("rows", ("num_tokens", "num_experts_per_tok", "moe_hidden_size"), "rows_dtype", role="inout"),
        Scalar("first_expert", "int32"),
    ),
    constraints=(
        AtMost("num_tokens", MAX_TOKENS, because="this is a kernel of the decode step"),
        Divisible("moe_hidden_size", by=TILE_ROWS, because="16 rows make a tile"),
        Divisible("packed_width", by=COLUMN_UNIT // 2, because="a lane owns two scale blocks of a row at least"),
        Equals("num_offsets", "num_experts + 1", because="every expert's routes begin and end somewhere"),
        Equals("2 * packed_width", "64 * ranges * groups", because="a warp per range has all of a row's columns"),
        Equals("packed_width", "8 * width_blocks", because="a scale serves 16 columns, a byte holds two"),
        Equals("expert_code_bytes", "moe_hidden_size * packed_width", because="every weight has a code"),
        Equals("expert_scale_bytes", "moe_hidden_size * width_blocks", because="16 weights share a scale"),
    ),
    targets=TARGETS,
    kernel="kernel:nvfp4_grouped_gemm_partial",
    reference="reference:nvfp4_grouped_gemm_partial",
    early_reads=("weight", "weight_scales", "down_scales", "expert_ids", "route_offsets", "routes"),
    partial_outputs=("rows",),
    instructions=("UBLKCP", "FENCE.VIEW.ASYNC", "LDG.E.128", "HMMA.16816.F32", "HMUL2", "F2FP", "ACQBULK", "PREEXIT"),
    cases=CASES,
)


def serving(experts: "Experts", width: int, rows_dtype: str) -> Specialization:
    """What serves experts of which this rank has `width` inner columns each, for any number of rows."""
    return SPEC.specialize(
        axes=const_axes(experts.moe_hidden_size, width, experts.num_experts_per_tok),
        dtypes={"rows_dtype": rows_dtype},
        statics=split(width, experts.moe_hidden_size),
    )


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """A slice of every expert, and whole experts; FP32 and BF16 rows."""
    experts = deployment.backbone.experts
    for width in dict.fromkeys((experts.intermediate_width(deployment.tp), experts.moe_intermediate_size)):
        for rows in ("float32", "bfloat16"):
            yield serving(experts, width, rows)
