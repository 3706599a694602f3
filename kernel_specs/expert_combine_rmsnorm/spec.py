"""The routed experts' outputs of each token, normed, weighted and summed: the end of the experts' part.

    r_j <- sum of rows[p, token, j] over the partials p, FP32, p ascending; not rounded
    y_j <- z * rsqrt(mean(z^2) + eps), z = r_j * (weight + 1)
    out <- BF16(sum of topk_weights[token, j] * y_j over the slots j, FP32, j ascending)

FP32 inside, one rounding at the store. A slot whose id is -1 (a padding token's, or another rank's expert)
contributes nothing, and its rows are not read; a token of none but such slots gives zeros.

The seam between ranks: `num_partials` is 1 where a rank holds whole rows, and the number of ranks where each of them
multiplied a slice of every expert and has sent its partial rows here, in rank order. The norm is not linear, so the
partial rows are summed before it, here and in FP32. A rank that holds whole rows of some experts only (id -1 for the
others) gets its share of the sum, rounded to BF16; whoever adds the shares up rounds again.

Ids and weights are read before `griddepcontrol.wait`. They must be complete before the two launches that precede this
one (the experts' GEMMs), the first of which must trigger its dependents after its own wait.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, Case, Divisible, Equals, KernelSpec, OneOf, Scalar, Specialization, Static, Tensor
from jitspark.target import TARGETS

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment, Experts

VECTOR = 4  # columns of a thread
MIN_THREADS = 128
TOKEN_CLASSES = (8, 32, 64)  # the most tokens that eight, four and two CTAs each pay off for
TOKENS_BY_SLOT = ("num_tokens", "num_experts_per_tok")


def split(moe_hidden_size: int, num_tokens: int, num_partials: int) -> dict[str, Static]:
    """Threads per CTA and CTAs per token: as many SMs as pay off read a token's rows at once.

    With 512 threads there are too few registers for the rows of many partials, whose reading takes longest.
    """
    threads = moe_hidden_size // VECTOR
    fewest = 2 if num_partials == 1 else 4
    widest = next((size for size, most in zip((8, 4), TOKEN_CLASSES, strict=False) if num_tokens <= most), fewest)
    cluster = max((size for size in (1, 2, 4, 8) if size <= widest and threads // size >= MIN_THREADS), default=1)
    return {"threads": threads // cluster, "cluster": cluster}


def _axes(num_partials: int, num_experts_per_tok: int, moe_hidden_size: int) -> dict[str, int]:
    return {
        "num_partials": num_partials,
        "num_experts_per_tok": num_experts_per_tok,
        "moe_hidden_size": moe_hidden_size,
    }


def _case(num_tokens: int, sizes: tuple[int, int, int], rows: str) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, **_axes(*sizes)},
        dtypes={"rows_dtype": rows},
        statics=split(sizes[2], num_tokens, sizes[0]),
        rtol=2**-7,  # one BF16 ulp
        atol=4e-6,  # FP32 remains where the routes cancel
        note="NaN in the rows of ids -1, tokens without experts, rows of zeros, huge and tiny rows",
    )


SPEC = KernelSpec(
    name="expert_combine_rmsnorm",
    axes={"num_tokens": VAR, "num_partials": CONST, "num_experts_per_tok": CONST, "moe_hidden_size": CONST},
    dtypes={"rows_dtype": ("float32", "bfloat16")},
    statics={
        "threads": (32, 64, 128, 256, 512, 1024),  # per CTA
        "cluster": (1, 2, 4, 8),  # CTAs per token
    },
    args=(
        Tensor("rows", ("num_partials", *TOKENS_BY_SLOT, "moe_hidden_size"), "rows_dtype"),
        Tensor("topk_ids", TOKENS_BY_SLOT, "int32", align=4),
        Tensor("topk_weights", TOKENS_BY_SLOT, "float32", align=4),
        Tensor("weight", ("moe_hidden_size",), "bfloat16"),
        Tensor("out", ("num_tokens", "moe_hidden_size"), "bfloat16", role="out"),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Divisible("moe_hidden_size", by=32 * VECTOR, because="every lane of a warp owns four columns"),
        Equals("moe_hidden_size", f"{VECTOR} * threads * cluster", because="each thread of a row has a vector of it"),
        OneOf("num_experts_per_tok", (2, 4, 8), because="the lanes of a warp share a token's sums of squares evenly"),
    ),
    targets=TARGETS,
    kernel="kernel:expert_combine_rmsnorm",
    reference="reference:expert_combine_rmsnorm",
    early_reads=("topk_ids", "topk_weights", "weight"),
    instructions=("LDG", "FFMA", "SHFL", "MUFU", "STG"),
    cases=(
        *(
            _case(num_tokens, (num_partials, 8, 4096), rows)
            for num_tokens in (1, 8, 24, 64)
            for num_partials in (1, 8)
            for rows in ("float32", "bfloat16")
        ),
        _case(8, (4, 8, 4096), "bfloat16"),
        _case(8, (16, 8, 4096), "bfloat16"),
        *(_case(num_tokens, (num_partials, 2, 256), "float32") for num_tokens in (8, 64) for num_partials in (1, 2)),
        _case(7, (1, 2, 256), "bfloat16"),
        _case(9, (1, 4, 1024), "float32"),
    ),
)


def serving(experts: "Experts", num_partials: int, num_tokens: int, rows_dtype: str) -> Specialization:
    """What serves `num_tokens` tokens whose rows lie in `num_partials` parts."""
    return SPEC.specialize(
        axes=_axes(num_partials, experts.num_experts_per_tok, experts.moe_hidden_size),
        dtypes={"rows_dtype": rows_dtype},
        statics=split(experts.moe_hidden_size, num_tokens, num_partials),
    )


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Whole rows, and a partial row from every rank; FP32 and BF16; for each way in which token counts are split."""
    experts = deployment.backbone.experts
    for num_partials in dict.fromkeys((1, deployment.tp)):
        for rows in ("float32", "bfloat16"):
            found = (serving(experts, num_partials, num_tokens, rows) for num_tokens in TOKEN_CLASSES)
            yield from {tuple(each.statics.items()): each for each in found}.values()
