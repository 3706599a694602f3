"""Two runs of one step, launch by launch: kernels against references, or one provider against another.

After each launch what the subject wrote is held against what the reference wrote, within the spec's own tolerances, and
then given to the reference: so every launch is judged alone, from equal inputs. Elements that neither changes are equal
bits, as both arenas begin as the same bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jitspark.checking.compare import Comparison, compare
from jitspark.checking.guarded import bits
from jitspark.plans.bound_plan import BoundPlan
from jitspark.plans.plan import Launch, TensorArgument
from jitspark.plans.reference_executor import argument_names
from jitspark.registry import kernel_names, load_spec

# Chosen by shape or number of rows, without a part in the result
# fmt: off
TILING = frozenset((
    "threads", "cluster", "max_tokens", "tile_rows", "tile_columns", "tile_blocks", "split", "row_warps", "warp_tiles",
    "column_warps", "stages", "key_groups", "pass_rows", "cta_tiles", "groups", "ranges", "sliding_window", "padded",
    "vector", "pooler_rows",
))
# fmt: on
# Quantized bytes: where a value lies next to a tie, FP32 and float64 round it to neighbouring codes
QUANTIZED = {
    "rmsnorm_nvfp4_quantize": ("codes", "scales"),
    "allgather_rmsnorm_nvfp4_quantize_routing": ("codes", "scales"),
    "nvfp4_grouped_gemm_swiglu": ("out_codes", "out_scales"),
}
TIES = 0.005  # of the bytes
POISON = 0xFF  # NaN in every floating-point type


@dataclass(frozen=True, slots=True)
class Judged:
    """One launch, and how each tensor that it wrote compares. `skipped` were seen in other shapes by the two runs."""

    launch: Launch
    comparisons: tuple[Comparison, ...]
    skipped: tuple[str, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        return tuple(each.problem for each in self.comparisons if each.problem is not None)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How strictly to judge: the specs' tolerances times `slack`, and `of_size` of a tensor's root mean square.

    may_leave: a launch may leave an output as it was, since the provider cuts the part otherwise and has no use for it.
    """

    slack: float = 1.0
    of_size: float = 0.0
    may_leave: bool = False


KERNELS = Bounds()
# Library calls round more often, and attention's weights relative to other maxima
OTHER_PROVIDER = Bounds(slack=4.0, of_size=2**-6, may_leave=True)


def compare_runs(subject: BoundPlan, reference: BoundPlan, bounds: Bounds = KERNELS) -> Iterator[Judged]:
    """Judge every launch of `subject`, in order, against the launch of that name of `reference`.

    Both are bound to equal weights and inputs, and to KV caches, outputs and arenas of their own.
    """
    others = {launch.name: launch for launch in reference.plan.launches}
    _begin_alike(subject, reference)
    for launch in subject.plan.launches:
        before = _left_before(subject, launch) if bounds.may_leave else {}
        made = subject.launch(launch)
        wanted = reference.launch(others[launch.name])
        if any(isinstance(each, Tensor) and each.is_cuda for each in made):
            torch.cuda.synchronize()
        yield _judge(launch, made, wanted, bounds, before)


def first_divergence(subject: BoundPlan, reference: BoundPlan) -> Judged | None:
    """The first launch of `subject` that writes something else than `reference`, or None."""
    return next((each for each in compare_runs(subject, reference) if each.problems), None)


def poison(plan: BoundPlan) -> None:
    """Fill the arena with NaN, as nothing in it may be of consequence for the next run."""
    plan.workspace.fill_(POISON)


def _begin_alike(subject: BoundPlan, reference: BoundPlan) -> None:
    poison(subject)
    poison(reference)
    others = reference.tensors
    for name, tensor in subject.outputs.items():
        bits(tensor).fill_(-1 if tensor.element_size() > 1 else POISON)
        others[name].copy_(tensor)


def _left_before(plan: BoundPlan, launch: Launch) -> dict[str, Tensor]:
    """Copies of what the launch is about to write."""
    names = [each.buffer for each in launch.tensors() if each.role in ("out", "part")]
    return {name: bits(plan.tensors[name]).clone() for name in names}


def _judge(
    launch: Launch, made: Sequence[Any], wanted: Sequence[Any], bounds: Bounds, before: Mapping[str, Tensor]
) -> Judged:
    found, skipped = [], []
    slack = bounds.slack
    allowed = {name: (slack * rtol, slack * atol) for name, (rtol, atol) in tolerances(launch).items()}
    for argument, name, got, want in zip(launch.arguments, argument_names(launch), made, wanted, strict=True):
        if not isinstance(argument, TensorArgument) or argument.role == "in":
            continue
        left = argument.buffer in before and bool((bits(got).flatten() == before[argument.buffer].flatten()).all())
        if got.shape != want.shape or left:
            skipped.append(name)
            continue
        quantized = name in QUANTIZED.get(launch.operation, ())
        rtol, atol = allowed.get(name, (0.0, 0.0))
        atol += bounds.of_size * float(want.double().square().mean().sqrt()) if bounds.of_size else 0.0
        found.append(_ties(name, got, want) if quantized else _compare(name, got, want, rtol, atol))
        want.copy_(got)
    return Judged(launch, tuple(found), tuple(skipped))


def _compare(name: str, got: Tensor, want: Tensor, rtol: float, atol: float) -> Comparison:
    """Within tolerance wherever bits differ."""
    same = bits(got) == bits(want)
    if bool(same.all()):
        return Comparison(name, 0.0, 0.0, None)
    return compare(name, got.masked_fill(same, 0), want.masked_fill(same, 0), rtol, atol)


def _ties(name: str, got: Tensor, want: Tensor) -> Comparison:
    share = float((got != want).float().mean())
    problem = f"{name}: {share:.2%} of the bytes differ" if share > TIES else None
    return Comparison(name, share, share / TIES, problem)


def tolerances(launch: Launch) -> Mapping[str, tuple[float, float]]:
    """(rtol, atol) of each argument: the widest of the spec's cases that compute the same."""
    if launch.operation not in kernel_names():
        return {}
    spec = load_spec(launch.operation)
    meaning = _meaning(launch.statics)
    alike = [case for case in spec.cases if _meaning(case.statics) == meaning] or list(spec.cases)
    names = argument_names(launch)
    bounds = {name: [case.tolerance_of(name) for case in alike] for name in names}
    return {name: (max(rtol for rtol, _ in each), max(atol for _, atol in each)) for name, each in bounds.items()}


def _meaning(statics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in statics.items() if name not in TILING}
