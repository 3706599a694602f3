"""What experts read, in one launch: the ranks' columns gathered, normed and quantized to NVFP4; and the routing.

    row              <- [shard of rank 0 | shard of rank 1 | ...]    `allgather_columns`, but that it is not stored
    codes, scales    <- the norm of row as NVFP4                     `rmsnorm_nvfp4_quantize`, the same bytes
    ids to schedule  <- the router's logits                          `sigmoid_bias_topk_routing`, with padding tokens

The two sides have nothing to do with each other but the time that they take, one beside the other. epochs: one per row.

The schedule (`expert_ids`, `route_offsets`, `routes`) is complete, and seen by the whole GPU, before this launch lets
the next one begin, which may therefore read it before `griddepcontrol.wait`. Weights are read before this one's own.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Divisible, Equals, KernelSpec, OneOf, Scalar, Specialization, Tensor
from jitspark.target import TARGETS
from kernel_specs.primitives.inbox import HALVES, WORLD_SIZES

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment, Experts

BLOCK = 16  # columns that share a scale
VECTOR = 8  # columns of a thread, all of one rank's
THREADS = 256  # of a CTA that has a row
# Whole warps share a row, once or in passes of all threads; their sums are added in pairs.
HIDDEN_SIZES = (*(32 * VECTOR * warps for warps in range(1, 8)), *(VECTOR * THREADS << doubled for doubled in range(4)))
MAX_TOKENS, MAX_EXPERTS = 64, 256
ROWS_BY_SHARD = ("num_tokens", "shard_size")
TOKENS_BY_SLOT = ("num_tokens", "num_experts_per_tok")


def _axes(hidden_size: int, world_size: int, experts: tuple[int, int]) -> dict[str, int]:
    num_experts, num_experts_per_tok = experts
    return {
        "hidden_size": hidden_size,
        "shard_size": hidden_size // world_size,
        "packed_size": hidden_size // 2,
        "num_blocks": hidden_size // BLOCK,
        "world_size": world_size,
        "num_experts": num_experts,
        "num_experts_per_tok": num_experts_per_tok,
        "num_offsets": num_experts + 1,
    }


def _case(num_tokens: int, hidden_size: int, world_size: int, experts: tuple[int, int]) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, **_axes(hidden_size, world_size, experts)},
        dtypes={},
        statics={},
        rtol=0.0,
        atol=0.0,
        note="exact ties of E2M1 and E4M3, saturation, rows of zeros; ties of scores, every token to the same experts",
        tolerances={"topk_weights": (2e-6, 1e-20)},  # a few FP32 roundings
    )


SPEC = KernelSpec(
    name="allgather_rmsnorm_nvfp4_quantize_routing",
    axes={
        "num_tokens": VAR,
        "hidden_size": CONST,  # shard_size * world_size
        "shard_size": CONST,
        "packed_size": CONST,  # hidden_size / 2
        "num_blocks": CONST,  # hidden_size / 16
        "world_size": CONST,
        "num_experts": CONST,
        "num_experts_per_tok": CONST,
        "num_offsets": CONST,  # num_experts + 1
    },
    dtypes={},
    statics={},
    args=(
        Tensor("shard", ROWS_BY_SHARD, "bfloat16"),
        Tensor("inbox", ("world_size", HALVES, *ROWS_BY_SHARD), "bfloat16", role="inout", align=8),
        Tensor("peers", ("world_size",), "int64", align=8),
        Tensor("epochs", ("num_tokens", 1), "int32", role="inout", align=4),
        Tensor("failure", (1,), "int32", role="inout", align=4),
        Tensor("weight", ("hidden_size",), "bfloat16"),
        Tensor("global_scale", (1,), "float32", align=4),
        Tensor("logits", ("num_tokens", "num_experts"), "float32"),
        Tensor("bias", ("num_experts",), "float32"),
        Tensor("is_padding", ("num_tokens",), "uint8", align=1),
        Tensor("codes", ("num_tokens", "packed_size"), "uint8", role="out"),
        Tensor("scales", ("num_tokens", "num_blocks"), "uint8", role="out"),
        Tensor("topk_ids", TOKENS_BY_SLOT, "int32", role="out", align=4),
        Tensor("topk_weights", TOKENS_BY_SLOT, "float32", role="out", align=4),
        Tensor("expert_ids", ("num_experts",), "int32", role="out", align=4),
        Tensor("route_offsets", ("num_offsets",), "int32", role="out", align=4),
        Tensor("routes", TOKENS_BY_SLOT, "int32", role="out", align=4),
        Tensor("num_distinct_experts", (1,), "int32", role="out", align=4),
        Scalar("rank", "int32"),
        Scalar("timeout_us", "int32"),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Equals("hidden_size", "shard_size * world_size", because="every rank has as many columns"),
        OneOf("hidden_size", HIDDEN_SIZES, because="whole warps share a row, whose sums are added in pairs"),
        Equals("hidden_size", "2 * packed_size", because="a byte holds two columns"),
        Equals("hidden_size", f"{BLOCK} * num_blocks", because="a scale serves 16 columns"),
        Divisible("shard_size", by=VECTOR, because="a thread's columns come from one rank"),
        OneOf("world_size", WORLD_SIZES, because="no other worlds were tried"),
        AtMost("num_tokens", MAX_TOKENS, because="an expert's tokens are one bit each"),
        AtMost("num_experts", MAX_EXPERTS, because="a thread schedules one expert"),
        Equals("num_offsets", "num_experts + 1", because="every expert's routes begin and end somewhere"),
        AtMost("num_experts_per_tok", "num_experts", because="a token chooses different experts"),
        AtMost("num_experts_per_tok", 8, because="eight lanes add up a token's scores"),
    ),
    targets=TARGETS,
    kernel="kernel:allgather_rmsnorm_nvfp4_quantize_routing",
    reference="reference:allgather_rmsnorm_nvfp4_quantize_routing",
    early_reads=("peers", "weight", "global_scale", "bias"),
    early_writes=("expert_ids", "route_offsets", "routes"),
    instructions=("STG.E.64.STRONG.SYS", "LDG.E.64.STRONG.SYS", "MUFU", "F2FP", "ACQBULK", "PREEXIT"),
    cases=tuple(
        _case(num_tokens, hidden_size, world_size, experts)
        for hidden_size, experts, token_counts, world_sizes in (
            (4096, (256, 8), (1, 8, 64), WORLD_SIZES),
            (4096, (256, 8), (16, 33), (8,)),
            (256, (8, 2), (5, 8, 64), (2, 4)),
        )
        for num_tokens in token_counts
        for world_size in world_sizes
    ),
)


def serving(experts: "Experts", world_size: int) -> Specialization:
    """What serves these experts, for any number of rows."""
    sizes = (experts.num_local_experts, experts.num_experts_per_tok)
    return SPEC.specialize(axes=_axes(experts.moe_hidden_size, world_size, sizes), statics={})


def serves(experts: "Experts") -> bool:
    return experts.moe_hidden_size in HIDDEN_SIZES


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """The experts' input; none for a rank alone."""
    if deployment.tp > 1 and serves(deployment.backbone.experts):
        yield serving(deployment.backbone.experts, deployment.tp)
