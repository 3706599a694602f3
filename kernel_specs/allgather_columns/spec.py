"""Every rank's BF16 columns put side by side in rank order, on every rank.

    out <- [shard of rank 0 | shard of rank 1 | ...]

Of the pooler's shards, the draft's fc shards, and the draft's logits, which every rank needs whole. Values are copied
as they are, but for zeros: of four neighbouring +0 the first may arrive as -0 (`primitives/inbox.py`, as for the other
arguments; epochs: one per row and chunk of a shard's columns).
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, Case, Divisible, Equals, KernelSpec, OneOf, Scalar, Specialization, Tensor
from jitspark.target import TARGETS
from kernel_specs.primitives.inbox import HALVES, WORLD_SIZES

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

PACKET = 4  # columns that travel together
MOST_THREADS = 128
ROWS_BY_SHARD = ("num_tokens", "shard_size")


def _axes(full_size: int, world_size: int) -> dict[str, int]:
    shard_size = full_size // world_size
    chunk = PACKET * _threads(shard_size)
    return {
        "full_size": full_size,
        "shard_size": shard_size,
        "num_chunks": -(-shard_size // chunk),
        "world_size": world_size,
    }


def _threads(shard_size: int) -> int:
    """Threads per CTA, each with one packet of the shard: no more warps than that fills."""
    return min(MOST_THREADS, -(-shard_size // (32 * PACKET)) * 32)


def _case(num_tokens: int, full_size: int, world_size: int) -> Case:
    return Case(
        axes={"num_tokens": num_tokens, **_axes(full_size, world_size)},
        dtypes={},
        statics={"threads": _threads(full_size // world_size)},
        rtol=0.0,
        atol=0.0,
        note="packets of zeros, zeros of both signs, infinities",
    )


SPEC = KernelSpec(
    name="allgather_columns",
    axes={
        "num_tokens": VAR,
        "full_size": CONST,  # shard_size * world_size
        "shard_size": CONST,
        "num_chunks": CONST,  # CTAs of a row
        "world_size": CONST,
    },
    dtypes={},
    statics={"threads": (32, 64, 96, 128)},  # per CTA
    args=(
        Tensor("shard", ROWS_BY_SHARD, "bfloat16"),
        Tensor("inbox", ("world_size", HALVES, *ROWS_BY_SHARD), "bfloat16", role="inout", align=8),
        Tensor("peers", ("world_size",), "int64", align=8),
        Tensor("epochs", ("num_tokens", "num_chunks"), "int32", role="inout", align=4),
        Tensor("failure", (1,), "int32", role="inout", align=4),
        Tensor("out", ("num_tokens", "full_size"), "bfloat16", role="out", align=8),
        Scalar("rank", "int32"),
        Scalar("timeout_us", "int32"),
    ),
    constraints=(
        Equals("full_size", "shard_size * world_size", because="every rank has as many columns"),
        Divisible("shard_size", by=PACKET, because="columns travel in packets of 8 bytes"),
        OneOf("world_size", WORLD_SIZES, because="a thread holds a packet of every rank"),
        Equals(
            "num_chunks",
            f"ceil_div(shard_size, {PACKET} * threads)",
            because="a thread has a packet",
        ),
    ),
    targets=TARGETS,
    kernel="kernel:allgather_columns",
    reference="reference:allgather_columns",
    early_reads=("peers",),
    instructions=("STG.E.64.STRONG.SYS", "LDG.E.64.STRONG.SYS", "ACQBULK", "PREEXIT"),
    cases=(
        *(_case(num_tokens, 4096, world_size) for num_tokens in (1, 8, 64) for world_size in WORLD_SIZES),
        *(_case(num_tokens, 8192, 8) for num_tokens in (8, 64)),
        *(_case(num_tokens, 202048, world_size) for num_tokens in (7, 56) for world_size in (8, 16)),
        _case(7, 256, 2),
        _case(9, 264, 2),
    ),
)


def serving(full_size: int, world_size: int) -> Specialization:
    """What gathers rows of `full_size` columns, for any number of rows."""
    return SPEC.specialize(axes=_axes(full_size, world_size), statics={"threads": _threads(full_size // world_size)})


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """The pooler's columns, the draft's fc and its logits; none for a rank alone."""
    if deployment.tp == 1:
        return
    draft = deployment.draft
    widths = (deployment.backbone.experts.moe_hidden_size, draft.hidden_size, draft.vocab_size)
    for full_size in dict.fromkeys(widths):
        yield serving(full_size, deployment.tp)
