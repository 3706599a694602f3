"""The sum of every rank's partial rows, and the residual boundary behind it, in one launch: 1 to 64 rows.

    branch <- sum of partial over the ranks, FP32, in rank order        `round_sum`: rounded to BF16
    then all that gated_residual_rmsnorm does with a branch, with the same statics and roundings

`shots` 1: every rank sends its BF16 row to all ranks, itself included, and each sums all of them: the same additions in
the same order, so all ranks end with the same bits. `shots` 2: block b of a row, of 128 columns, belongs to rank b mod
world; a rank sums its own columns of all rows, which the others send it, and sends the sums in FP32 to all: the same
additions again, for 3 / world of the bytes and one more trip. How ranks exchange, and why without flags, is in
`primitives/inbox.py`:

* `inbox` lies in symmetric memory, zero when bound; `peers` holds its address on every rank, in rank order. With two
  shots so do `row_inbox`, for columns of rows, and `sum_inbox`, for sums, with their addresses in `row_peers` and
  `sum_peers`;
* `epochs`, zero when bound, lie in this rank's own memory; `failure` is the word that tells 1 + a silent rank, one for
  all exchanges of a rank. `rank` is this rank's place, `timeout_us` how long another one is waited for.

An inbox and its epochs may serve many launches, all with the same number of rows and the same split of rows.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, Case, Divisible, Equals, KernelSpec, OneOf, Scalar, Specialization, Static, Tensor
from jitspark.target import TARGETS
from kernel_specs.gated_residual_rmsnorm import spec as boundary_spec
from kernel_specs.gated_residual_rmsnorm.spec import TOKENS_BY_HIDDEN, Boundary
from kernel_specs.primitives.inbox import EPOCH_COLUMNS, HALVES, WORLD_SIZES
from kernel_specs.primitives.row_split import TOKEN_CLASSES

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

SHARD = ("world_size", HALVES, "num_tokens", "shard_size")
PEERS = Tensor("peers", ("world_size",), "int64", align=8)
CONTROL = (
    Tensor("epochs", ("num_tokens", EPOCH_COLUMNS), "int32", role="inout", align=4),
    Tensor("failure", (1,), "int32", role="inout", align=4),
)
EXCHANGE = (
    Tensor("inbox", ("world_size", HALVES, *TOKENS_BY_HIDDEN), "bfloat16", role="inout", when=("shots", 1)),
    replace(PEERS, when=("shots", 1)),
    Tensor("row_inbox", SHARD, "bfloat16", role="inout", when=("shots", 2)),
    replace(PEERS, name="row_peers", when=("shots", 2)),
    Tensor("sum_inbox", SHARD, "float32", role="inout", when=("shots", 2)),
    replace(PEERS, name="sum_peers", when=("shots", 2)),
    *CONTROL,
)
BOUNDARY = boundary_spec.SPEC.args[1:]  # behind the branch
BLOCK = 128  # columns of a row that one rank sums, with two shots
# From here on two shots take less time, as predicted in NOTES.md; not in smaller worlds.
TWO_SHOT_WORLD, TWO_SHOT_TOKENS = 8, 32


def boundary_cases(world_sizes: tuple[tuple[int, int], ...], boundaries: tuple[Boundary, ...]) -> Iterator[Case]:
    """The boundary's own cases of `boundaries`, for each (world size, most rows)."""
    for case in boundary_spec.SPEC.cases:
        meant = {name: case.statics[name] for name in boundaries[0]}
        for world_size, most in world_sizes:
            if meant in boundaries and case.axes["num_tokens"] <= most:
                yield replace(case, axes={**case.axes, "world_size": world_size})


def _with(case: Case, *, round_sum: bool = False, shots: int = 1) -> Case:
    axes = {**case.axes, "shard_size": case.axes["hidden_size"] // case.axes["world_size"]}
    return replace(case, axes=axes, statics={**case.statics, "round_sum": round_sum, "shots": shots})


def _two_shot_cases() -> Iterator[Case]:
    for case in boundary_cases(((2, 8), (4, 7), (8, 64), (16, 64)), BOUNDARIES):
        if case.axes["hidden_size"] % (BLOCK * case.axes["world_size"]) == 0:
            yield _with(case, shots=2)
            if case.axes["world_size"] == 8 and case.axes["num_tokens"] == 56:
                yield _with(case, round_sum=True, shots=2)


BOUNDARIES = (
    *(each for each in boundary_spec.backbone_boundaries(2, ()) if each["post_norm"] == "weightless"),
    *boundary_spec.draft_boundaries(),
)

SPEC = KernelSpec(
    name="allreduce_gated_residual_rmsnorm",
    axes={"num_tokens": VAR, "hidden_size": CONST, "shard_size": CONST, "world_size": CONST},
    dtypes={},
    statics={**boundary_spec.SPEC.statics, "round_sum": (False, True), "shots": (1, 2)},
    args=(
        Tensor("partial", TOKENS_BY_HIDDEN, "bfloat16"),
        *EXCHANGE,
        *(arg for arg in BOUNDARY if isinstance(arg, Tensor)),
        Scalar("rank", "int32"),
        Scalar("timeout_us", "int32"),
        *(arg for arg in BOUNDARY if isinstance(arg, Scalar)),
    ),
    constraints=(
        *boundary_spec.SPEC.constraints,
        OneOf("world_size", WORLD_SIZES, because="a thread holds its columns of every rank's row"),
        Equals("hidden_size", "shard_size * world_size", because="every rank sums as many columns"),
        Divisible("shard_size", by=BLOCK, because="a rank sums whole blocks of columns", when=("shots", 2)),
    ),
    targets=TARGETS,
    kernel="kernel:allreduce_gated_residual_rmsnorm",
    reference="reference:allreduce_gated_residual_rmsnorm",
    early_reads=("peers", "row_peers", "sum_peers", *boundary_spec.SPEC.early_reads),
    instructions=("STG.E.64.STRONG.SYS", "LDG.E.64.STRONG.SYS", "STG.E.128", "STAS", "ACQBULK", "PREEXIT"),
    cases=(
        *(
            _with(case, round_sum=round_sum)
            for case in boundary_cases(((2, 64), (8, 64), (4, 7), (16, 8)), BOUNDARIES)
            for round_sum in (False, True)
            if not round_sum or (case.axes["world_size"] == 8 and case.axes["num_tokens"] == 8)
        ),
        *_two_shot_cases(),
    ),
)


def shots_for(hidden_size: int, num_tokens: int, world_size: int) -> int:
    """How ranks sum `num_tokens` rows in the least time."""
    many = world_size >= TWO_SHOT_WORLD and num_tokens >= TWO_SHOT_TOKENS
    return 2 if many and hidden_size % (BLOCK * world_size) == 0 else 1


def serving(
    hidden_size: int, num_tokens: int, world_size: int, boundary: Boundary, *, round_sum: bool = False
) -> Specialization:
    """What serves this boundary behind a sum over `world_size` ranks, for `num_tokens` rows."""
    chosen: dict[str, Static] = {"round_sum": round_sum, "shots": shots_for(hidden_size, num_tokens, world_size)}
    axes = {"hidden_size": hidden_size, "shard_size": hidden_size // world_size, "world_size": world_size}
    return SPEC.specialize(axes=axes, statics=boundary_spec.statics(hidden_size, num_tokens, boundary) | chosen)


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Behind the backbone's attention, and behind attention and FFN of the draft; none for a rank alone."""
    if deployment.tp == 1:
        return
    asked = (
        *((deployment.backbone.hidden_size, each) for each in BOUNDARIES if each["mode"] == "backbone"),
        *((deployment.draft.hidden_size, each) for each in BOUNDARIES if each["mode"] == "draft"),
    )
    for hidden_size, boundary in asked:
        classes = (*TOKEN_CLASSES, TWO_SHOT_TOKENS)
        found = (serving(hidden_size, num_tokens, deployment.tp, boundary) for num_tokens in classes)
        yield from {tuple(each.statics.items()): each for each in found}.values()
