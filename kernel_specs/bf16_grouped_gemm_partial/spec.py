"""The experts' second product in BF16, for the routes of a schedule: each active expert is read once.

    rows[token, slot] <- h[token, slot] . w2[e]^T    FP32 sums, rounded once to FP32 or BF16

for each route (token, slot) to an expert e that is held here. A rank holds either a slice of every expert (first_expert
0), so that K is its share of the intermediate width and its rows are partial sums, or whole experts: routes to experts
outside [first_expert, first_expert + num_local_experts) are skipped, and so is what the schedule leaves out (padding
tokens). Their rows stay as they are, hence `inout`; `expert_combine_rmsnorm` does not read rows of ids -1.

The seam between ranks: rows is one partial of `expert_combine_rmsnorm`, which adds those of all ranks up in FP32. BF16
rows are the only further rounding; the stock kernel rounds whole rows to BF16.

`weight` is vLLM's w2, not repacked; the schedule is that of `sigmoid_bias_topk_routing`. Any number of experts, any
distribution of routes, a fixed summation order. Experts with more than `pass_rows` rows are multiplied again for the
rest, which finds their weights in L2. All of it is read after `griddepcontrol.wait`, and dependents are triggered
behind that.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, Case, Divisible, KernelSpec, Scalar, Specialization, Tensor
from jitspark.target import TARGETS
from kernel_specs.bf16_grouped_gemm_swiglu.spec import (
    INSTRUCTIONS,
    SCHEDULE,
    SCHEDULE_AXES,
    SCHEDULE_CONSTRAINTS,
    STATICS,
    TOKENS_BY_SLOT,
    schedule_sizes,
    served,
)
from kernel_specs.primitives.grouped_tiling import choose

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment, Experts

ROWS_DTYPES = ("float32", "bfloat16")


def _axes(num_experts_per_tok: int, moe_hidden_size: int, intermediate_width: int) -> dict[str, int]:
    """The CONST axes."""
    return {
        "num_experts_per_tok": num_experts_per_tok,
        "moe_hidden_size": moe_hidden_size,
        "intermediate_width": intermediate_width,
    }


def _case(num_tokens: int, experts: tuple[int, int, int], sizes: tuple[int, int], rows: str, note: str) -> Case:
    """`experts`: how many there are, how many are held here, how many a token chooses. `sizes`: width and K."""
    num_experts, num_local_experts, num_experts_per_tok = experts
    return Case(
        axes={
            **schedule_sizes(num_tokens, num_experts, num_local_experts),
            **_axes(num_experts_per_tok, *sizes),
        },
        dtypes={"rows_dtype": rows},
        statics=choose(sizes[1], sizes[0], 1, num_tokens),
        rtol=2**-7 if rows == "bfloat16" else 2e-5,  # one BF16 ulp, or what FP32 sums lose
        atol=1e-4,  # FP32 sums of values near 1
        note=note,
    )


CASES = (
    *(_case(rows, (8, 8, 2), (256, 256), "bfloat16", "tiny") for rows in (1, 7, 8, 9, 16, 24, 64)),
    *(_case(rows, (8, 8, 2), (256, 256), "float32", "tiny") for rows in (8, 64)),
    *(_case(rows, (8, 8, 2), (256, 128), "float32", "tiny, TP 2") for rows in (8, 40)),
    *(_case(rows, (8, 4, 2), (256, 256), "bfloat16", "tiny, half of the experts") for rows in (8, 64)),
    _case(1, (8, 4, 2), (256, 256), "bfloat16", "no expert held here"),
    _case(1, (256, 32, 8), (4096, 512), "float32", "no expert held here"),
    *(_case(rows, (1, 1, 1), (4096, 512), "float32", "one expert has all rows") for rows in (1, 8, 17, 64)),
    *(_case(rows, (8, 8, 8), (4096, 256), "bfloat16", "eight experts have all rows each") for rows in (8, 33, 64)),
    _case(8, (64, 64, 8), (512, 128), "float32", "64 routes to 64 experts"),
    _case(64, (128, 16, 2), (512, 128), "bfloat16", "128 routes to 128 experts, of which 16 are here"),
    *(_case(rows, (256, 32, 8), (64, 256), "float32", "256 experts, of which 32 are here") for rows in (8, 64)),
    _case(2, (16, 16, 8), (4096, 512), "bfloat16", "each route to its own expert"),
    *(_case(rows, (16, 16, 8), (4096, 512), dtype, "TP 8") for rows in (8, 16, 24, 64) for dtype in ROWS_DTYPES),
    *(_case(rows, (12, 12, 8), (4096, 1024), "float32", "TP 4") for rows in (8, 64)),
    *(_case(rows, (16, 16, 8), (4096, 256), "float32", "TP 16") for rows in (8, 48)),
    *(_case(rows, (16, 2, 8), (4096, 4096), dtype, "whole experts") for rows in (8, 40) for dtype in ROWS_DTYPES),
)

SPEC = KernelSpec(
    name="bf16_grouped_gemm_partial",
    axes={
        **SCHEDULE_AXES,
        "num_experts_per_tok": CONST,
        "moe_hidden_size": CONST,
        "intermediate_width": CONST,
    },
    dtypes={"rows_dtype": ROWS_DTYPES},
    statics=STATICS,
    args=(
        Tensor("h", (*TOKENS_BY_SLOT, "intermediate_width"), "bfloat16"),
        Tensor("weight", ("num_local_experts", "moe_hidden_size", "intermediate_width"), "bfloat16"),
        *SCHEDULE,
        Tensor("rows", (*TOKENS_BY_SLOT, "moe_hidden_size"), "rows_dtype", role="inout"),
        Scalar("first_expert", "int32"),
    ),
    constraints=(
        *SCHEDULE_CONSTRAINTS,
        Divisible("intermediate_width", by="tile_columns", because="K is cut into whole pipeline stages"),
        Divisible("moe_hidden_size", by="32 * cta_tiles", because="a tile has 32 weight rows"),
    ),
    targets=TARGETS,
    kernel="kernel:bf16_grouped_gemm_partial",
    reference="reference:bf16_grouped_gemm_partial",
    partial_outputs=("rows",),
    instructions=INSTRUCTIONS,
    cases=CASES,
)


def serving(experts: "Experts", width: int, num_tokens: int, rows_dtype: str) -> Specialization:
    """What serves `num_tokens` rows, where this rank has `width` inner columns of each expert."""
    return SPEC.specialize(
        axes=_axes(experts.num_experts_per_tok, experts.moe_hidden_size, width),
        dtypes={"rows_dtype": rows_dtype},
        statics=choose(width, experts.moe_hidden_size, 1, num_tokens),
    )


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """What bf16_grouped_gemm_swiglu serves, for rows of either dtype."""
    for width, num_tokens in served(deployment):
        for rows in ROWS_DTYPES:
            yield serving(deployment.backbone.experts, width, num_tokens, rows)
