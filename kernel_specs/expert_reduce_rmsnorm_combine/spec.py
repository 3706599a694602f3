"""Every rank's partial rows of the routed experts, summed across ranks, normed, weighted and summed per token.

    r_j <- sum of rows[token, j] over the ranks, FP32, in rank order; not rounded
    y_j <- z * rsqrt(mean(z^2) + eps), z = r_j * (weight + 1)
    out <- BF16(sum of topk_weights[token, j] * y_j over the slots j, FP32, j ascending)

FP32 inside; the only roundings are that of the partial rows, where `rows_dtype` is BF16, and the one at the end. The
norm is not linear: partial rows are summed before it. A slot whose id is -1 (a padding token's) contributes nothing,
whatever its rows hold: zeros are sent in their place, so that an owner hears of every rank in each launch (see the
proof in `primitives/inbox.py`). Ids and weights must be the same on all ranks.

**Two steps in one launch.** Token t is owned by rank t mod world, where it has place t // world. Every rank sends its
rows of a token to the owner, which sums, norms and combines them and sends the result, one BF16 row, to all. So a rank
sends 1 / world of what it would send if each rank summed all rows itself, for one more trip; and every rank has the
owner's very bits.

The ranks exchange as `primitives/inbox.py` says, through two inboxes: `row_inbox` for partial rows, `sum_inbox` for
results, both zero when bound and with their addresses on all ranks in `row_peers` and `sum_peers`; `num_owned` is
ceil(num_tokens / world). For epochs, failure, rank and timeout_us see allreduce_gated_residual_rmsnorm.

Ids and weights are read before `griddepcontrol.wait`, as in expert_combine_rmsnorm. A token's CTAs on one rank wait for
those of the same token on others and for nothing else, and CTAs start in the order of tokens: so a grid larger than the
GPU holds at once gets through too.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, Case, Divisible, Equals, KernelSpec, OneOf, Scalar, Specialization, Static, Tensor
from jitspark.target import TARGETS
from kernel_specs.primitives.inbox import EPOCH_COLUMNS, HALVES, WORLD_SIZES

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment, Experts

VECTOR = 4  # columns of a thread
MIN_THREADS = 128
MOST_CLUSTER = 8
TOKENS_BY_SLOT = ("num_tokens", "num_experts_per_tok")
OWNED_BY_HIDDEN = ("num_owned", "moe_hidden_size")


def owned_tokens(num_tokens: int, world_size: int) -> int:
    """`num_owned`: the most tokens that a rank owns."""
    return -(-num_tokens // world_size)


def split(moe_hidden_size: int) -> dict[str, Static]:
    """Threads per CTA and CTAs per token: an owner's SMs read all ranks' rows of its token at once."""
    threads = moe_hidden_size // VECTOR
    fitting = (size for size in (1, 2, 4, 8) if size <= MOST_CLUSTER and threads // size >= MIN_THREADS)
    cluster = max(fitting, default=1)
    return {"threads": threads // cluster, "cluster": cluster}


def _axes(world_size: int, num_experts_per_tok: int, moe_hidden_size: int) -> dict[str, int]:
    return {"world_size": world_size, "num_experts_per_tok": num_experts_per_tok, "moe_hidden_size": moe_hidden_size}


def _case(num_tokens: int, sizes: tuple[int, int, int], rows: str) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, "num_owned": owned_tokens(num_tokens, sizes[0]), **_axes(*sizes)},
        dtypes={"rows_dtype": rows},
        statics=split(sizes[2]),
        rtol=2**-7,  # one BF16 ulp
        atol=4e-6,  # FP32 remains where the routes cancel
        note="NaN in the rows of ids -1, tokens without experts, rows of zeros, huge and tiny rows",
    )


SPEC = KernelSpec(
    name="expert_reduce_rmsnorm_combine",
    axes={
        "num_tokens": VAR,
        "num_owned": VAR,  # ceil(num_tokens / world_size)
        "world_size": CONST,
        "num_experts_per_tok": CONST,
        "moe_hidden_size": CONST,
    },
    dtypes={"rows_dtype": ("float32", "bfloat16")},
    statics={
        "threads": (32, 64, 128, 256, 512, 1024),  # per CTA
        "cluster": (1, 2, 4, 8),  # CTAs per token
    },
    args=(
        Tensor("rows", (*TOKENS_BY_SLOT, "moe_hidden_size"), "rows_dtype"),
        Tensor("topk_ids", TOKENS_BY_SLOT, "int32", align=4),
        Tensor("topk_weights", TOKENS_BY_SLOT, "float32", align=4),
        Tensor("weight", ("moe_hidden_size",), "bfloat16"),
        Tensor(
            "row_inbox",
            ("world_size", HALVES, "num_owned", "num_experts_per_tok", "moe_hidden_size"),
            "rows_dtype",
            role="inout",
        ),
        Tensor("row_peers", ("world_size",), "int64", align=8),
        Tensor("sum_inbox", ("world_size", HALVES, *OWNED_BY_HIDDEN), "bfloat16", role="inout"),
        Tensor("sum_peers", ("world_size",), "int64", align=8),
        Tensor("epochs", ("num_tokens", EPOCH_COLUMNS), "int32", role="inout", align=4),
        Tensor("failure", (1,), "int32", role="inout", align=4),
        Tensor("out", ("num_tokens", "moe_hidden_size"), "bfloat16", role="out"),
        Scalar("rank", "int32"),
        Scalar("timeout_us", "int32"),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Divisible("moe_hidden_size", by=32 * VECTOR, because="every lane of a warp owns four columns"),
        Equals("moe_hidden_size", f"{VECTOR} * threads * cluster", because="each thread of a row has a vector of it"),
        OneOf("num_experts_per_tok", (2, 4, 8), because="the lanes of a warp share a token's sums of squares evenly"),
        OneOf("world_size", WORLD_SIZES, because="no other worlds were tried"),
    ),
    targets=TARGETS,
    kernel="kernel:expert_reduce_rmsnorm_combine",
    reference="reference:expert_reduce_rmsnorm_combine",
    early_reads=("row_peers", "sum_peers", "topk_ids", "topk_weights", "weight"),
    instructions=("STG.E.64.STRONG.SYS", "LDG.E.64.STRONG.SYS", "FFMA", "SHFL", "MUFU"),
    cases=(
        *(
            _case(num_tokens, (world_size, 8, 4096), rows)
            for num_tokens in (1, 8, 24, 64)
            for world_size in (2, 8)
            for rows in ("float32", "bfloat16")
        ),
        _case(8, (4, 8, 4096), "bfloat16"),
        _case(8, (16, 8, 4096), "bfloat16"),
        *(_case(num_tokens, (2, 2, 256), "float32") for num_tokens in (8, 63)),
        _case(7, (2, 2, 256), "bfloat16"),
        _case(9, (4, 4, 1024), "float32"),
    ),
)


def serving(experts: "Experts", world_size: int, rows_dtype: str) -> Specialization:
    """What serves partial rows from `world_size` ranks, for any number of tokens."""
    return SPEC.specialize(
        axes=_axes(world_size, experts.num_experts_per_tok, experts.moe_hidden_size),
        dtypes={"rows_dtype": rows_dtype},
        statics=split(experts.moe_hidden_size),
    )


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """FP32 and BF16 rows of the backbone's experts; none for a rank alone."""
    if deployment.tp > 1:
        for rows_dtype in ("float32", "bfloat16"):
            yield serving(deployment.backbone.experts, deployment.tp, rows_dtype)
