"""One kernel at one place of the step: proved right here and now, then timed beside what else does the same work."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.baselines import Baseline, baselines
from bench.packed_cache import specialization_of
from bench.timing import Timing, chain, launches_for, time_chains
from bench.workload import TOKEN_SETS, Values, Workload, build, copied, rotation_bytes
from jitspark.checking.arguments import reference_function, tensor_args
from jitspark.checking.compare import Comparison, compare
from jitspark.spec import Case, Specialization

OURS = "jitspark"
# Library calls round where a fused kernel does not: held to wider bounds, so that they are known to do the same work.
BASELINE_SLACK = 4.0
MANY_SETS = 256  # more than this means weights so small that their latency counts, not their bytes
FLOOR_RATIO, FLOOR_SLACK_US = 1.15, 1.2  # the aim for a GEMM: the larger of ratio and slack
FIXED_RATE = 4.42e6  # bytes per microsecond
# aims at M = 8
AIMS_US = {
    "gated_residual_rmsnorm": 1.6,
    "sigmoid_bias_topk_routing": 1.6,
    "rmsnorm_nvfp4_quantize": 1.6,
    "expert_combine_rmsnorm": 1.6,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """A launch's times by who made it, and how far each was from the reference in the same run.

    `timings` are with weights from memory. Where weights are small, `warm_timings` are with weights in the L2 cache:
    the difference is what a launch waits for memory, the rest what it costs anyway.
    """

    launch: Mapping[str, Any]
    moved_bytes: int
    floor_us: float
    aim_us: float | None
    argument_sets: int
    timings: Mapping[str, Timing]
    warm_timings: Mapping[str, Timing]
    margins: Mapping[str, float]
    wrong: Mapping[str, str]

    @property
    def best_baseline(self) -> str | None:
        others = {name: timing.median_us for name, timing in self.timings.items() if name != OURS}
        return min(others, key=lambda name: others[name], default=None)

    def to_json(self) -> dict[str, Any]:
        """All of it, and the floor at a fixed rate, so that runs with different measured floors can be compared."""
        return {**asdict(self), "floor_us_at_4_42_tb_per_s": self.moved_bytes / FIXED_RATE}


def measure(
    launch: Mapping[str, Any], kernel: Callable[..., Any], rate: float, generator: torch.Generator, replays: int
) -> Measured:
    """Check and time one launch. `rate` is the read floor in bytes per microsecond."""
    specialization = specialization_of(launch)
    work = build(specialization, launch["axes"], generator, rotation_bytes())
    who = [Baseline(OURS, lambda values: kernel(*values.values())), *baselines(specialization)]
    checked, refused = _check_all(who, work)
    who = [each for each in who if each.name in checked]
    right = [each for each in who if all(found.margin <= _slack(each) for found in checked[each.name])]
    floor_us = work.moved_bytes / rate
    warm = work.sets[:TOKEN_SETS] if len(work.sets) > MANY_SETS else []
    return Measured(
        launch=launch,
        moved_bytes=work.moved_bytes,
        floor_us=floor_us,
        aim_us=_aim(launch, floor_us),
        argument_sets=len(work.sets),
        timings=_time(right, work.sets, floor_us, replays),
        warm_timings=_time([each for each in right if each.name == OURS], warm, floor_us, replays) if warm else {},
        margins={name: _finite(max(found.margin for found in each)) for name, each in checked.items()},
        wrong={each.name: _why(checked[each.name]) for each in who if each not in right} | refused,
    )


def _check_all(who: Sequence[Baseline], work: Workload) -> tuple[dict[str, Sequence[Comparison]], dict[str, str]]:
    """What each one's result is like, and why others than ours could not be called."""
    checked: dict[str, Sequence[Comparison]] = {}
    refused: dict[str, str] = {}
    for each in who:
        try:
            checked[each.name] = _check(each, work)
        except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as problem:
            if each.name == OURS:
                raise
            refused[each.name] = f"{type(problem).__name__}: {problem}".splitlines()[0]
    return checked, refused


def _time(who: Sequence[Baseline], sets: Sequence[Values], floor_us: float, replays: int) -> dict[str, Timing]:
    """Every contender on the same argument sets, replayed in turn."""
    launches = launches_for(len(sets), max(1.1 * floor_us, 1.5))
    chains = {each.name: chain([partial(each.call, values) for values in sets], launches) for each in who}
    return time_chains(chains, launches, replays)


def _check(who: Baseline, work: Workload) -> Sequence[Comparison]:
    """What it writes for the first argument set, against the reference."""
    specialization = work.specialization
    got, want = copied(work.sets[0]), copied(work.sets[0])
    for values in (got, want):
        for arg in tensor_args(specialization):
            if arg.role == "out" and values[arg.name].is_floating_point():
                values[arg.name].fill_(math.nan)
    reference_function(specialization)(*want.values(), **specialization.statics)
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a launch may read step inputs before it waits for what precedes it
    returned = who.call(got) or {}
    written = [arg.name for arg in tensor_args(specialization) if arg.role != "in"]
    case = _nearest_case(specialization)
    found = [
        compare(name, returned.get(name, got[name]), want[name], *case.tolerance_of(name))
        for name in who.writes or written
    ]
    return [_excused(each, who, returned.get(each.argument, got[each.argument]), want[each.argument]) for each in found]


def _excused(found: Comparison, who: Baseline, got: torch.Tensor, want: torch.Tensor) -> Comparison:
    """Integers of which a baseline may have some different ones: the margin is the share over what is allowed."""
    if not who.differing or got.dtype.is_floating_point:
        return found
    share = float((who.alike(found.argument, got) != who.alike(found.argument, want)).float().mean())
    margin = share / who.differing
    problem = f"{found.argument}: {share:.1%} differ" if margin > BASELINE_SLACK else None
    return replace(found, margin=margin, problem=problem)


def _nearest_case(specialization: Specialization) -> Case:
    """The bounds of a case with the same epilogue, if it has one, that shares most statics and sizes."""
    epilogue = specialization.statics.get("epilogue")

    def shared(case: Case) -> tuple[bool, int]:
        chosen = {**specialization.axes, **specialization.statics}
        alike = sum({**case.axes, **case.statics}.get(name) == value for name, value in chosen.items())
        return case.statics.get("epilogue") == epilogue, alike

    return max(specialization.spec.cases, key=shared)


def _slack(who: Baseline) -> float:
    return 1.0 if who.name == OURS else BASELINE_SLACK


def _why(found: Sequence[Comparison]) -> str:
    return "; ".join(each.problem for each in found if each.problem)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else -1.0


def _aim(launch: Mapping[str, Any], floor_us: float) -> float | None:
    if launch["kernel"] == "skinny_gemm_bf16":
        return max(FLOOR_RATIO * floor_us, floor_us + FLOOR_SLACK_US)
    partials = launch["axes"].get("num_partials", 1)
    return AIMS_US.get(launch["kernel"]) if launch["axes"]["num_tokens"] == 8 and partials == 1 else None


def line(found: Measured) -> str:
    """A row of the table: who is faster, and how far from the floor and the aim."""
    name = f"{found.launch['part'][:44]:<44} {found.launch['axes']['num_tokens']:>3}"
    if OURS not in found.timings:
        return f"{name}  WRONG: {found.wrong[OURS]}"
    ours, best = found.timings[OURS].median_us, found.best_baseline
    sizes = f"{found.moved_bytes / 1e6:>8.2f} {found.floor_us:>8.2f} {ours:>8.2f} {ours / found.floor_us:>6.2f}"
    other = (
        f"{found.timings[best].median_us:>8.2f} {_ratio(found, best):>6.2f} {best}" if best else f"{'-':>8} {'-':>6}"
    )
    aim = "" if found.aim_us is None else ("  aim met" if ours <= found.aim_us else f"  aim {found.aim_us:.2f}")
    warm = f"  ({found.warm_timings[OURS].median_us:.2f} from L2)" if found.warm_timings else ""
    return f"{name} {sizes} {other}{aim}{warm}"


def heading() -> str:
    columns = [f"{'part':<44} {'M':>3}", *(f"{name:>8}" for name in ("MB", "floor us", "ours us"))]
    return " ".join([*columns, f"{'/floor':>6} {'other us':>8} {'/ours':>6} which"])


def _ratio(found: Measured, name: str) -> float:
    return found.timings[name].median_us / found.timings[OURS].median_us
