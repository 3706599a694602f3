"""A decode step with expert parallelism: each rank has whole experts, E / tp of them, instead of a slice of every one.

The step that `decode_plan` makes, its experts' GEMMs over other weights: rank r has the experts r * E / tp and those
behind it, and its rows are whole, or absent where another rank has the expert. A rank then waits in each layer for the
one whose experts are the most distinct. Rows are exchanged by the same kernel, which sums partial rows: so what a rank
does not write it sends as zeros, which a launch of its own (`clear_rows`) writes beforehand. For comparisons; no worker
is served so. Imports no torch.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jitspark.plans.buffer_planner import Tenant, intervals, place
from jitspark.plans.builder import TORCH, Keys, nbytes
from jitspark.plans.checks import PlanChecker
from jitspark.plans.expert_launches import ROWS_DTYPE
from jitspark.plans.plan import CUTE, Buffer, Kind, Launch, Plan, ScalarArgument, TensorArgument
from jitspark.spec import Scalar, Specialization, Tensor
from kernel_specs.bf16_grouped_gemm_partial import spec as bf16_grouped_gemm_partial
from kernel_specs.bf16_grouped_gemm_swiglu import spec as bf16_grouped_gemm_swiglu
from kernel_specs.nvfp4_grouped_gemm_partial import spec as nvfp4_grouped_gemm_partial
from kernel_specs.nvfp4_grouped_gemm_swiglu import spec as nvfp4_grouped_gemm_swiglu

if TYPE_CHECKING:  # a machine that only runs plans has no geometry library
    import torch

    from jitspark.geometry import Experts

PURPOSE = "ranks-bench"  # of plans in a pack
SLICES, WHOLE = "slices", "whole"  # of the experts, on each rank
FIRST_EXPERT = "first_expert"  # the number that a rank binds: the first expert that it has
CLEAR = "clear_rows"


def clear_rows(rows: "torch.Tensor") -> None:
    rows.zero_()


OPERATIONS = {(TORCH, CLEAR): clear_rows}


def first_expert(experts: int, rank: int, ranks: int) -> int:
    return rank * (experts // ranks)


def whole_experts(experts: "Experts", rows: int) -> Mapping[str, Specialization]:
    """What serves whole experts, by operation."""
    width = experts.moe_intermediate_size
    served = (
        nvfp4_grouped_gemm_swiglu.serving(experts, width),
        nvfp4_grouped_gemm_partial.serving(experts, width, ROWS_DTYPE),
        bf16_grouped_gemm_swiglu.serving(experts, width, rows),
        bf16_grouped_gemm_partial.serving(experts, width, rows, ROWS_DTYPE),
    )
    return {each.name: each for each in served}


def with_whole_experts(plan: Plan, experts: "Experts", keys: Keys) -> Plan:
    """The decode step `plan` of several ranks with whole experts. Raises ValueError where they cannot be dealt out.

    `experts` are the geometry's; each rank binds FIRST_EXPERT and OPERATIONS.
    """
    if experts.num_local_experts % plan.tp or plan.tp == 1:
        raise ValueError(f"{experts.num_local_experts} experts for {plan.tp} ranks")
    served = whole_experts(experts, plan.rows)
    local = experts.num_local_experts // plan.tp
    buffers = plan.buffer_named()
    launches: list[Launch] = []
    for launch in plan.launches:
        if launch.operation not in served:
            launches.append(launch)
            continue
        chosen = served[launch.operation]
        shapes = _shapes(launch, chosen, local, buffers)
        buffers |= {name: replace(buffers[name], shape=shape) for name, shape in shapes.items()}
        rows = [each.buffer for each in launch.tensors() if each.role == "part" and each.buffer == "expert_rows"]
        launches += [_clearing(launch, each) for each in rows]
        launches.append(_served(launch, chosen, keys))
    made = _placed(replace(plan, buffers=tuple(buffers.values()), launches=tuple(launches)))
    PlanChecker().require(made, f"plan with whole experts, {plan.rows} rows")
    return made


def _shapes(
    launch: Launch, chosen: Specialization, local: int, buffers: Mapping[str, Buffer]
) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the launch, by buffer."""
    pairs = list(zip(chosen.args, launch.arguments, strict=True))
    bound: dict[str, Any] = {}
    for arg, argument in pairs:
        if isinstance(arg, Tensor) and isinstance(argument, TensorArgument):
            assert argument.shape is None, argument
            bound |= dict(zip(arg.axes, buffers[argument.buffer].shape, strict=True))
    bound |= {**chosen.axes, "num_local_experts": local}
    return {
        argument.buffer: tuple(bound[axis] if isinstance(axis, str) else axis for axis in arg.axes)
        for arg, argument in pairs
        if isinstance(arg, Tensor) and isinstance(argument, TensorArgument)
    }


def _served(launch: Launch, chosen: Specialization, keys: Keys) -> Launch:
    arguments = tuple(
        ScalarArgument(FIRST_EXPERT, arg.dtype) if arg.name == FIRST_EXPERT and isinstance(arg, Scalar) else argument
        for arg, argument in zip(chosen.args, launch.arguments, strict=True)
    )
    key = keys.of(chosen) if launch.provider == CUTE else None
    return replace(launch, arguments=arguments, statics=chosen.statics, key=key)


def _clearing(launch: Launch, rows: str) -> Launch:
    name = f"{launch.name.rpartition('.')[0]}.{CLEAR}"
    return Launch(name, launch.part, TORCH, CLEAR, None, (TensorArgument(rows, "out"),), {})


def _placed(plan: Plan) -> Plan:
    """The plan with places in the workspace for buffers of other sizes."""
    alive = intervals(plan.launches)
    offsets, size = place(
        Tenant(each.name, nbytes(each), alive[each.name]) for each in plan.buffers if each.kind is Kind.WORKSPACE
    )
    buffers = tuple(replace(each, offset=offsets.get(each.name, each.offset)) for each in plan.buffers)
    return replace(plan, buffers=buffers, workspace_bytes=size)
