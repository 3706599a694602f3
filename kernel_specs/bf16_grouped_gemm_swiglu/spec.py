"""The experts' first product and SwiGLU in BF16, for the routes of a schedule: each active expert is read once.

    G, U <- activation[token] . w1[e]^T, activation[token] . w3[e]^T    FP32 sums
    h[token, slot] <- BF16(silu(G) * U)

for each route (token, slot) to an expert e that is held here. silu and the product are FP32; h is rounded once, G and U
are not. This is what the NVFP4 experts do up to the quantization of h; how the stock BF16 kernel rounds inside was not
seen, and one that rounds G and U to BF16 first differs by a few ulp of h.

`weight` is vLLM's w13, not repacked: rows [0, intermediate_width) of an expert are w1 (gate), those behind w3 (up). A
rank holds either a slice of every expert's rows (first_expert 0) or whole experts: routes to experts outside
[first_expert, first_expert + num_local_experts) are skipped, and so is what the schedule leaves out (padding tokens).
Rows of h that no route held here has stay as they are, hence `inout`; whoever multiplies h by the same schedule does
not read them.

The schedule is that of `sigmoid_bias_topk_routing`; any number of experts, any distribution of routes. The summation
order is fixed: same input, same bits. Experts with more than `pass_rows` rows are multiplied again for the rest, which
finds their weights in L2. All of it is read after `griddepcontrol.wait`, and dependents are triggered behind that: a
launch two places behind this one may rely on the schedule before its own wait.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Divisible, Equals, KernelSpec, Scalar, Specialization, Tensor
from jitspark.target import TARGETS
from kernel_specs.primitives.grouped_tiling import MAX_STAGES, PASS_ROWS, choose

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment, Experts

TOKENS_BY_SLOT = ("num_tokens", "num_experts_per_tok")
# What both products of the experts have: a schedule, and tiles of the weights that it names.
SCHEDULE_AXES = {
    "num_tokens": VAR,
    "num_experts": VAR,  # that the schedule knows
    "num_offsets": VAR,  # num_experts + 1
    "num_local_experts": VAR,  # that are held here
}
SCHEDULE = (
    Tensor("expert_ids", ("num_experts",), "int32", align=4),
    Tensor("route_offsets", ("num_offsets",), "int32", align=4),
    Tensor("routes", TOKENS_BY_SLOT, "int32", align=4),
)
SCHEDULE_CONSTRAINTS = (
    AtMost("num_tokens", 64, because="a decode step has at most 64 rows"),
    Equals("num_offsets", "num_experts + 1", because="every expert's routes begin and end somewhere"),
)
STATICS = {
    "pass_rows": PASS_ROWS,  # rows of an expert that are multiplied at once
    "tile_columns": (128, 256),  # of K, of a pipeline stage
    "stages": tuple(range(2, MAX_STAGES + 1)),
    "cta_tiles": (1, 2, 4, 8),  # tiles of 32 weight rows that a CTA goes through
}
INSTRUCTIONS = (
    "UTMALDG",  # bulk tensor copies of the weights
    "UBLKCP",  # a bulk copy of each row
    "HMMA.16816.F32.BF16",
    "FENCE.VIEW.ASYNC",  # without it a copy overtakes loads of the stage it refills
    "ACQBULK",
    "PREEXIT",
)


def _axes(num_experts_per_tok: int, moe_hidden_size: int, intermediate_width: int) -> dict[str, int]:
    """The CONST axes."""
    return {
        "num_experts_per_tok": num_experts_per_tok,
        "moe_hidden_size": moe_hidden_size,
        "gate_up_rows": 2 * intermediate_width,
        "intermediate_width": intermediate_width,
    }


def schedule_sizes(num_tokens: int, num_experts: int, num_local_experts: int) -> dict[str, int]:
    """The axes of a schedule, for a case."""
    return {
        "num_tokens": num_tokens,
        "num_experts": num_experts,
        "num_offsets": num_experts + 1,
        "num_local_experts": num_local_experts,
    }


def _case(num_tokens: int, experts: tuple[int, int, int], sizes: tuple[int, int], note: str) -> Case:
    """`experts`: how many there are, how many are held here, how many a token chooses. `sizes`: K and width."""
    num_experts, num_local_experts, num_experts_per_tok = experts
    return Case(
        axes={
            **schedule_sizes(num_tokens, num_experts, num_local_experts),
            **_axes(num_experts_per_tok, *sizes),
        },
        dtypes={},
        statics=choose(*sizes, 2, num_tokens),
        rtol=2**-7,  # one BF16 ulp
        atol=1e-4,  # FP32 sums of values near 1
        note=note,
    )


CASES = (
    *(_case(rows, (8, 8, 2), (256, 256), "tiny") for rows in (1, 7, 8, 9, 16, 24, 64)),
    *(_case(rows, (8, 8, 2), (256, 128), "tiny, TP 2") for rows in (8, 40)),
    *(_case(rows, (8, 4, 2), (256, 256), "tiny, half of the experts") for rows in (8, 64)),
    _case(1, (8, 4, 2), (256, 256), "no expert held here"),
    _case(1, (256, 32, 8), (4096, 512), "no expert held here"),
    _case(9, (8, 8, 2), (128, 64), "two blocks of K"),
    *(_case(rows, (1, 1, 1), (4096, 512), "one expert has all rows") for rows in (1, 8, 17, 64)),
    *(_case(rows, (8, 8, 8), (4096, 256), "eight experts have all rows each") for rows in (8, 33, 64)),
    _case(8, (64, 64, 8), (512, 128), "64 routes to 64 experts"),
    _case(64, (128, 16, 2), (512, 128), "128 routes to 128 experts, of which 16 are here"),
    *(_case(rows, (256, 32, 8), (256, 32), "256 experts, of which 32 are here") for rows in (8, 64)),
    _case(2, (16, 16, 8), (4096, 512), "each route to its own expert"),
    *(_case(rows, (16, 16, 8), (4096, 512), "TP 8") for rows in (8, 16, 24, 64)),
    *(_case(rows, (12, 12, 8), (4096, 1024), "TP 4") for rows in (8, 64)),
    *(_case(rows, (16, 16, 8), (4096, 256), "TP 16") for rows in (8, 48)),
    *(_case(rows, (16, 2, 8), (4096, 4096), "whole experts") for rows in (8, 40)),
)

SPEC = KernelSpec(
    name="bf16_grouped_gemm_swiglu",
    axes={
        **SCHEDULE_AXES,
        "num_experts_per_tok": CONST,
        "moe_hidden_size": CONST,
        "gate_up_rows": CONST,  # 2 * intermediate_width
        "intermediate_width": CONST,
    },
    dtypes={},
    statics=STATICS,
    args=(
        Tensor("activation", ("num_tokens", "moe_hidden_size"), "bfloat16"),
        Tensor("weight", ("num_local_experts", "gate_up_rows", "moe_hidden_size"), "bfloat16"),
        *SCHEDULE,
        Tensor("h", (*TOKENS_BY_SLOT, "intermediate_width"), "bfloat16", role="inout"),
        Scalar("first_expert", "int32"),
    ),
    constraints=(
        *SCHEDULE_CONSTRAINTS,
        Divisible("moe_hidden_size", by="tile_columns", because="K is cut into whole pipeline stages"),
        Equals("gate_up_rows", "2 * intermediate_width", because="an output's weights are a gate and an up row"),
        Divisible("intermediate_width", by="16 * cta_tiles", because="a tile has 16 gate and 16 up rows"),
    ),
    targets=TARGETS,
    kernel="kernel:bf16_grouped_gemm_swiglu",
    reference="reference:bf16_grouped_gemm_swiglu",
    partial_outputs=("h",),
    instructions=(*INSTRUCTIONS, "MUFU"),
    cases=CASES,
)


def serving(experts: "Experts", width: int, num_tokens: int) -> Specialization:
    """What serves `num_tokens` rows, where this rank has `width` outputs of each expert."""
    return SPEC.specialize(
        axes=_axes(experts.num_experts_per_tok, experts.moe_hidden_size, width),
        statics=choose(experts.moe_hidden_size, width, 2, num_tokens),
    )


def served(deployment: "Deployment") -> Iterator[tuple[int, int]]:
    """(this rank's width of each expert, number of rows): a slice of every expert and whole experts, for few and for
    more rows; none where no layer has BF16 experts.
    """
    experts = deployment.backbone.experts
    if experts.weight_dtype == "bfloat16" or experts.bf16_layers:
        widths = (experts.intermediate_width(deployment.tp), experts.moe_intermediate_size)
        yield from ((width, num_tokens) for width in dict.fromkeys(widths) for num_tokens in PASS_ROWS)


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """All that is `served`."""
    for width, num_tokens in served(deployment):
        yield serving(deployment.backbone.experts, width, num_tokens)
