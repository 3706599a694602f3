"""One case of one kernel, checked: right values, nothing else touched, the same bits every time, also in a graph.

The kernel is anything that takes the specialization's arguments; on a CPU the same checks run without a graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor as TorchTensor

from jitspark.checking.arguments import (
    Arguments,
    Draw,
    allocate,
    draw_arguments,
    reference_function,
    tensor_args,
)
from jitspark.checking.compare import Comparison, compare, differing, kept
from jitspark.checking.guarded import bits
from jitspark.spec import Case, Specialization

WRITTEN = ("out", "inout")
# Sizes of inout values in the runs that find out what a reference writes: a value that it writes may by chance be the
# one that stood there, but hardly in every run.
PROBE_SCALES = (3.0, 100.0, 1e4)

Call = Callable[..., Any]
Snapshot = Mapping[str, TorchTensor]


@dataclass(frozen=True, slots=True)
class Expected:
    """What the reference wrote for one draw, and for inout tensors which elements it leaves alone."""

    values: Snapshot
    unwritten: Snapshot


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a case went. `title` names the specialization and every VAR axis."""

    title: str
    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        return not self.problems

    @property
    def margin(self) -> float:
        return max((each.margin for each in self.comparisons), default=0.0)


def case_title(specialization: Specialization, axes: Mapping[str, int]) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in axes.items() if name not in specialization.axes)
    return f"{specialization.title()} {sizes}"


def check_case(
    specialization: Specialization,
    case: Case,
    kernel: Call,
    generator: torch.Generator,
    capture: Callable[[Callable[[], None]], Callable[[], None]] | None = None,
) -> Outcome:
    """Check `kernel` on fresh random arguments of `case`, on the generator's device.

    `capture(call)` returns what replays `call`: a CUDA graph on a GPU (the default there), the call itself on a CPU.
    """
    first, second = (draw_arguments(specialization, case.axes, generator) for _ in range(2))
    arguments = allocate(specialization, case.axes, first, generator.device)
    expected = expect(specialization, case, first, generator)
    run = _Run(arguments, kernel)

    eager = run.eager(first)
    found = judge(case, arguments, first, eager, expected)
    comparisons = list(found.comparisons)
    problems = list(found.problems)
    problems += _differences("a second run gives other bits: ", eager, run.eager(first))

    replayed = run.replayed(first, second, capture or default_capture(generator.device))
    found = judge(case, arguments, second, replayed, expect(specialization, case, second, generator))
    comparisons += found.comparisons
    problems += [f"replayed with refreshed inputs: {text}" for text in found.problems]
    problems += _differences("a graph's replay differs from a launch: ", replayed, run.eager(second))
    return Outcome(case_title(specialization, case.axes), tuple(comparisons), tuple(problems))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found wrong after one call."""

    comparisons: tuple[Comparison, ...]
    problems: tuple[str, ...]


def judge(case: Case, arguments: Arguments, draw: Draw, got: Snapshot, expected: Expected) -> Verdict:
    """Compare what one call wrote, and look at everything that it must not write."""
    comparisons = tuple(
        compare(name, value, expected.values[name], *case.tolerance_of(name)) for name, value in got.items()
    )
    problems = [each.problem for each in comparisons if each.problem is not None]
    for name, unwritten in expected.unwritten.items():
        drawn = draw[name]
        assert isinstance(drawn, TorchTensor)
        problems += filter(None, [kept(name, got[name], drawn, unwritten)])
    problems += _inputs_changed(arguments, draw)
    for name, guarded in arguments.tensors.items():
        touched = guarded.bytes_touched_outside()
        if touched:
            problems.append(f"{name}: {touched} bytes before, after or between its rows were written")
    return Verdict(comparisons, tuple(problems))


def expect(specialization: Specialization, case: Case, draw: Draw, generator: torch.Generator) -> Expected:
    """Run the reference on copies of `draw`. Its own outputs start as poison: what it forgets to write never passes."""
    values = reference_run(specialization, case.axes, draw)
    inouts = [arg.name for arg in tensor_args(specialization) if arg.role == "inout"]
    floating = [name for name in inouts if values[name].dtype.is_floating_point]
    unwritten = {name: _same(values[name], draw[name]) for name in inouts}
    for scale in PROBE_SCALES if floating else ():
        probe = {**draw, **{name: _redrawn(draw[name], scale, generator) for name in floating}}
        probed = reference_run(specialization, case.axes, probe)
        unwritten = {name: mask & _same(probed[name], probe[name]) for name, mask in unwritten.items()}
    return Expected(values, unwritten)


def reference_run(specialization: Specialization, axes: Mapping[str, int], draw: Draw) -> Snapshot:
    """What the reference writes for `draw`."""
    device = next(value.device for value in draw.values() if isinstance(value, TorchTensor))
    copies = allocate(specialization, axes, draw, device)
    copies.fill(draw)
    reference_function(specialization)(*copies.values(), **specialization.statics)
    return copies.snapshot(WRITTEN)


def default_capture(device: torch.device) -> Callable[[Callable[[], None]], Callable[[], None]]:
    return cuda_graph if device.type == "cuda" else lambda call: call


def cuda_graph(call: Callable[[], None]) -> Callable[[], None]:
    """Capture `call`, which must have run before, and return what replays it."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # not `torch.cuda.graph`, which collects garbage each time: that would take most of a check
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        call()
        graph.capture_end()
    replay: Callable[[], None] = graph.replay
    return replay


@dataclass(frozen=True, slots=True)
class _Run:
    arguments: Arguments
    kernel: Call

    def eager(self, draw: Draw) -> Snapshot:
        return self._around(draw, self._launch)

    def replayed(
        self, captured_with: Draw, refreshed: Draw, capture: Callable[[Callable[[], None]], Callable[[], None]]
    ) -> Snapshot:
        """Capture with one draw, replay with another in the same memory."""
        self.arguments.fill(captured_with)
        self._synchronize()
        return self._around(refreshed, capture(self._launch))

    def _around(self, draw: Draw, launch: Callable[[], None]) -> Snapshot:
        self.arguments.fill(draw)
        # A launch may read step inputs before it waits for the launch that precedes it, here a copy into them.
        self._synchronize()
        launch()
        self._synchronize()
        return self.arguments.snapshot(WRITTEN)

    def _launch(self) -> None:
        self.kernel(*self.arguments.values())

    def _synchronize(self) -> None:
        if any(guarded.storage.is_cuda for guarded in self.arguments.tensors.values()):
            torch.cuda.synchronize()


def _inputs_changed(arguments: Arguments, draw: Draw) -> list[str]:
    found = []
    for name, value in arguments.snapshot(("in",)).items():
        difference = differing(value, arguments.drawn(name, draw))
        if difference is not None:
            found.append(f"input {name} was written: {difference}")
    return found


def _differences(prefix: str, first: Snapshot, second: Snapshot) -> Sequence[str]:
    return [f"{prefix}{name}, {text}" for name in first if (text := differing(first[name], second[name]))]


def _same(after: TorchTensor, before: object) -> TorchTensor:
    assert isinstance(before, TorchTensor)
    return bits(after) == bits(before)


def _redrawn(value: object, scale: float, generator: torch.Generator) -> TorchTensor:
    assert isinstance(value, TorchTensor)
    fresh = scale * torch.randn(value.shape, generator=generator, device=generator.device)
    return torch.empty_like(value).copy_(fresh)
