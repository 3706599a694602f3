"""A part of the step as calls that can be timed: ours and whatever else does the same work, held to each other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bench.timing import Timing, chain, launches_for, time_chains

OURS = "jitspark"

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Scene:
    """Calls by contender, one per set of arguments: weights and caches go by more than the L2 cache holds.

    moved_bytes: what one call must read and write. wrong: by contender, what differs from the reference or from ours;
    such a one is not timed. unchecked: contenders whose result was not compared, and why. absent: what this machine
    lacks. kinds: how many calls, from the first one on, differ in their function.
    """

    moved_bytes: int
    calls: Mapping[str, Sequence[Call]]
    wrong: Mapping[str, str] = field(default_factory=dict)
    unchecked: Mapping[str, str] = field(default_factory=dict)
    absent: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class MeasuredPart:
    """A part's times in one run."""

    part: Mapping[str, Any]
    moved_bytes: int
    floor_us: float
    aim_us: float | None
    argument_sets: int
    timings: Mapping[str, Timing]
    wrong: Mapping[str, str]
    unchecked: Mapping[str, str]
    absent: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_part(part: Mapping[str, Any], scene: Scene, rate: float, replays: int) -> MeasuredPart:
    """Every contender on the same argument sets, replayed in turn. `rate`: the read floor, bytes per microsecond."""
    floor_us = scene.moved_bytes / rate
    right = {name: calls for name, calls in scene.calls.items() if name not in scene.wrong}
    sets = len(next(iter(scene.calls.values())))
    launches = launches_for(sets, max(1.2 * floor_us, 3.0))
    chains = {name: chain(calls, launches) for name, calls in right.items()}
    aim = part["aim_us"] if part["aim_ratio"] is None else part["aim_ratio"] * floor_us
    return MeasuredPart(
        part=part,
        moved_bytes=scene.moved_bytes,
        floor_us=floor_us,
        aim_us=aim,
        argument_sets=sets,
        timings=time_chains(chains, launches, replays),
        wrong=dict(scene.wrong),
        unchecked=dict(scene.unchecked),
        absent=list(scene.absent),
    )


def in_turn(*calls: Call) -> Call:
    """One call that makes all of these."""

    def everything() -> None:
        for call in calls:
            call()

    return everything


def contenders(
    scene_of: Mapping[str, Callable[[], Sequence[Call]]],
) -> tuple[dict[str, Sequence[Call]], list[str]]:
    """What could be made and called, and the names of what this machine lacks or what refuses these sizes, and why."""
    made: dict[str, Sequence[Call]] = {}
    absent = []
    for name, make in scene_of.items():
        try:
            calls = make()
            calls[0]()
        except (ImportError, RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError) as problem:
            said = str(problem) if isinstance(problem, ImportError) else f"{type(problem).__name__}: {problem}"
            absent.append(f"{name} ({(said.splitlines() or [''])[0]})")
        else:
            made[name] = calls
    return made, absent


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; infinite where a value is NaN."""
    difference = (got.double() - want.double()).norm() / want.double().norm()
    return float(difference) if bool(difference.isfinite()) else float("inf")


def beyond(name: str, error: float, bound: float) -> dict[str, str]:
    """What `Scene.wrong` says of a contender whose relative error is `error`."""
    return {} if error <= bound else {name: f"relative error {error:.3g}, more than {bound:.3g}"}


def part_line(found: MeasuredPart) -> str:
    """A row of the printed table."""
    name = f"{found.part['part'][:44]:<44} {found.part['num_tokens']:>3}"
    if OURS not in found.timings:
        return f"{name}  WRONG: {found.wrong.get(OURS)}"
    ours = found.timings[OURS].median_us
    aim = "" if found.aim_us is None else f"  aim {found.aim_us:.2f} {'met' if ours <= found.aim_us else 'MISSED'}"
    others = ", ".join(f"{who} {timing.median_us:.2f}" for who, timing in found.timings.items() if who != OURS)
    notes = "".join(f"; {who} WRONG: {why}" for who, why in found.wrong.items())
    notes += "".join(f"; absent: {each}" for each in found.absent)
    sizes = f"{found.moved_bytes / 1e6:>8.2f} {found.floor_us:>8.2f} {ours:>8.2f} {ours / found.floor_us:>6.2f}"
    return f"{name} {sizes}  {others}{aim}{notes}"
