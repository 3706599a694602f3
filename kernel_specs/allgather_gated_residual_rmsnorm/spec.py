"""Every rank's columns of a branch put side by side in rank order, and the residual boundary behind it, in one launch.

    branch <- [shard of rank 0 | shard of rank 1 | ...]
    then all that gated_residual_rmsnorm does with a branch, with the same statics and roundings

The ranks exchange as in allreduce_gated_residual_rmsnorm: see its arguments there, and `primitives/inbox.py`.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, Case, Divisible, Equals, KernelSpec, OneOf, Scalar, Specialization, Tensor
from jitspark.target import TARGETS
from kernel_specs.allreduce_gated_residual_rmsnorm.spec import BOUNDARY, CONTROL, PEERS, boundary_cases
from kernel_specs.gated_residual_rmsnorm import spec as boundary_spec
from kernel_specs.gated_residual_rmsnorm.spec import Boundary
from kernel_specs.primitives.inbox import HALVES, WORLD_SIZES
from kernel_specs.primitives.row_split import TOKEN_CLASSES

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

TOKENS_BY_SHARD = ("num_tokens", "shard_size")
PACKET = 4  # BF16 columns that travel together

BOUNDARIES = tuple(  # of a backbone whose last layer is tapped too, or not
    dict(each)
    for each in {
        tuple(each.items()): each
        for taps in ((), (0, 2))
        for each in boundary_spec.backbone_boundaries(3, taps)
        if each["post_norm"] == "input_scale"
    }.values()
)


def _axes(hidden_size: int, world_size: int) -> dict[str, int]:
    return {"hidden_size": hidden_size, "shard_size": hidden_size // world_size, "world_size": world_size}


def _with_shard(case: Case) -> Case:
    axes = {"num_tokens": case.axes["num_tokens"], **_axes(case.axes["hidden_size"], case.axes["world_size"])}
    return Case(axes, case.dtypes, case.statics, case.rtol, case.atol, case.note, case.tolerances)


SPEC = KernelSpec(
    name="allgather_gated_residual_rmsnorm",
    axes={
        "num_tokens": VAR,
        "hidden_size": CONST,
        "shard_size": CONST,  # hidden_size / world_size
        "world_size": CONST,
    },
    dtypes={},
    statics=boundary_spec.SPEC.statics,
    args=(
        Tensor("shard", TOKENS_BY_SHARD, "bfloat16"),
        Tensor("inbox", ("world_size", HALVES, *TOKENS_BY_SHARD), "bfloat16", role="inout"),
        PEERS,
        *CONTROL,
        *(arg for arg in BOUNDARY if isinstance(arg, Tensor)),
        Scalar("rank", "int32"),
        Scalar("timeout_us", "int32"),
        *(arg for arg in BOUNDARY if isinstance(arg, Scalar)),
    ),
    constraints=(
        *boundary_spec.SPEC.constraints,
        Equals("hidden_size", "shard_size * world_size", because="every rank has as many columns"),
        Divisible("shard_size", by=2 * PACKET, because="a thread sends two packets of one shard"),
        OneOf("world_size", WORLD_SIZES, because="no other worlds were tried"),
    ),
    targets=TARGETS,
    kernel="kernel:allgather_gated_residual_rmsnorm",
    reference="reference:allgather_gated_residual_rmsnorm",
    early_reads=("peers", *boundary_spec.SPEC.early_reads),
    instructions=("STG.E.64.STRONG.SYS", "LDG.E.64.STRONG.SYS", "STG.E.128", "STAS", "ACQBULK", "PREEXIT"),
    cases=tuple(map(_with_shard, boundary_cases(((2, 64), (8, 64), (4, 7), (16, 8)), BOUNDARIES))),
)


def serving(hidden_size: int, num_tokens: int, world_size: int, boundary: Boundary) -> Specialization:
    """What serves this boundary behind a gather from `world_size` ranks, for `num_tokens` rows."""
    statics = boundary_spec.statics(hidden_size, num_tokens, boundary)
    return SPEC.specialize(axes=_axes(hidden_size, world_size), statics=statics)


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Behind the backbone's unpooler shards; none for a rank alone."""
    if deployment.tp == 1:
        return
    backbone = deployment.backbone
    for boundary in boundary_spec.backbone_boundaries(backbone.num_hidden_layers, backbone.tap_layers):
        if boundary["post_norm"] == "input_scale":
            found = (serving(backbone.hidden_size, rows, deployment.tp, boundary) for rows in TOKEN_CLASSES)
            yield from {tuple(each.statics.items()): each for each in found}.values()
