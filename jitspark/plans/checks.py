"""Whether a plan makes sense: on making, and on loading before anything trusts it. Standard library only.

Checked are what plans for any number of rows have in common (`frame_checks`), sizes, places in the arenas, how much
memory a plan asks for, and that each launch is served by the entry that it names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jitspark.plans.buffer_planner import ALIGNMENT, Interval, aligned, intervals, meet
from jitspark.plans.format import plan_error
from jitspark.plans.frame_checks import MAPPED, Problem, frame_problems, is_shape
from jitspark.plans.plan import CUTE, SIZED, Buffer, Kind, Launch, Plan, Size, TensorArgument
from jitspark.spec import DTYPE_BYTES

Alive = Mapping[str, tuple[Interval, ...]]

ALLOCATED = SIZED - {Kind.INPUT}  # for a plan, when it is bound
ARENAS = {"workspace": frozenset((Kind.WORKSPACE,)), "symmetric memory": MAPPED}
PLACED = frozenset.union(*ARENAS.values())
MAX_BYTES = 1 << 32  # of all that is allocated for a plan; the largest known takes a thirtieth
MAX_PLACED = 1024  # buffers of an arena, whose pairs are compared; the largest known has 43 in both


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about a frame: when buffers are alive, and which launches see one in another shape."""

    frame: object  # kept, so that its id stays its own
    alive: Alive
    viewing: tuple[int, ...]
    sized: tuple[int, ...]  # buffers whose shapes are a plan's own
    apart: set[tuple[str, str]] = field(default_factory=set)  # pairs that are never alive at one time


class PlanChecker:
    """Checks plans. What those of one frame share (names, and the order of reads and writes) is checked once."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        # what is good in any frame, and launches that are for a target and host; kept, so that ids stay their own
        self._weights: dict[int, Buffer] = {}
        self._served: dict[tuple[str, str], dict[int, Launch]] = {}

    def require(self, plan: Plan, where: str, frame: object = None) -> None:
        """Raise PlanError for the first problem of `plan`, which comes from `where`."""
        problem = next(self.problems(plan, frame), None)
        if problem is not None:
            raise plan_error(f"{where}: {problem.where}", problem.found, problem.needed)

    def problems(self, plan: Plan, frame: object = None) -> Iterator[Problem]:
        """All that is wrong with `plan`. `frame` is the same object for plans that differ in sizes and keys alone."""
        known = self._known.get(id(frame))
        if known is None:
            yield from frame_problems(plan, self._weights)
            known = _found_out(plan, frame)
            if frame is not None:
                self._known[id(frame)] = known
        yield from self._own_problems(plan, known)

    def _own_problems(self, plan: Plan, known: _Known) -> Iterator[Problem]:
        """Problems of sizes, places and keys."""
        served = self._served.setdefault((plan.target, plan.host), {})
        for launch in plan.launches:
            if id(launch) not in served:
                problem = _key_problem(plan, launch)
                if problem is None:
                    served[id(launch)] = launch
                else:
                    yield problem
        sized = [plan.buffers[index] for index in known.sized]
        for each in sized:
            yield from _shape_problems(each)
            if each.kind is Kind.PEERS and (each.shape, each.dtype) != ((plan.tp,), "int64"):
                found = f"shape {list(each.shape)} of {each.dtype}"
                yield Problem(each.name, found, f"an address for each of {plan.tp} ranks")
        named = plan.buffer_named() if known.viewing else {}
        for index in known.viewing:
            for argument in plan.launches[index].tensors():
                yield from _view_problems(plan.launches[index].name, argument, named)
        yield from _memory_problems(plan, sized, known)


def _found_out(plan: Plan, frame: object) -> _Known:
    viewing = [i for i, launch in enumerate(plan.launches) if any(each.shape is not None for each in launch.tensors())]
    sized = [index for index, each in enumerate(plan.buffers) if each.kind in SIZED]
    return _Known(frame, intervals(plan.launches), tuple(viewing), tuple(sized))


def _shape_problems(buffer: Buffer) -> Iterator[Problem]:
    shape = buffer.shape
    if not is_shape(shape):
        yield Problem(buffer.name, f"shape {list(shape)}", "sizes above 0, or names")
    elif buffer.kind in ALLOCATED and not _is_whole(shape):
        yield Problem(buffer.name, f"shape {list(shape)}", f"numbers alone, as a {buffer.kind} buffer is allocated")
    if buffer.strides is not None and len(buffer.strides) != len(shape):
        yield Problem(buffer.name, f"{len(buffer.strides)} strides for {len(shape)} axes", "one for each axis")


def _is_whole(shape: Sequence[Size]) -> bool:
    """Whether all of it is known, and something."""
    return all(type(size) is int and size > 0 for size in shape)


def _key_problem(plan: Plan, launch: Launch) -> Problem | None:
    key = launch.key
    if (key is None) is (launch.provider == CUTE):
        return Problem(launch.name, f"provider {launch.provider}, key {key}", f"a key for {CUTE}, and for nobody else")
    if key is not None and (key.kernel, key.target, key.host) != (launch.operation, plan.target, plan.host):
        return Problem(launch.name, f"key {key}", f"a key of {launch.operation} for {plan.target}, {plan.host}")
    return None


def _view_problems(launch: str, argument: TensorArgument, named: Mapping[str, Buffer]) -> Iterator[Problem]:
    buffer, shape = named.get(argument.buffer), argument.shape
    if shape is None or buffer is None:
        return
    whole = buffer.strides is None and _is_whole(shape) and _is_whole(buffer.shape)
    if not whole or math.prod(map(int, shape)) != math.prod(map(int, buffer.shape)):
        yield Problem(launch, f"{buffer.name} as {list(shape)}", f"as many elements as {list(buffer.shape)}")


def _memory_problems(plan: Plan, sized: Sequence[Buffer], known: _Known) -> Iterator[Problem]:
    """More memory than any plan takes; arenas of another size; places in them that are wrong."""
    if not all(each.dtype in DTYPE_BYTES and _is_whole(each.shape) for each in sized if each.kind in ALLOCATED):
        return  # said already: it has no size
    owned = sum(_nbytes(each) for each in sized if each.kind in (Kind.OUTPUT, Kind.PEERS))
    if owned + plan.workspace_bytes + plan.symmetric_bytes > MAX_BYTES:
        yield Problem("memory", f"{owned + plan.workspace_bytes + plan.symmetric_bytes} bytes", f"at most {MAX_BYTES}")
    if any(each.offset for each in sized if each.kind not in PLACED):
        yield Problem("memory", "a place of a buffer that lies in no arena", "offset 0")
    for (name, kinds), end in zip(ARENAS.items(), (plan.workspace_bytes, plan.symmetric_bytes), strict=True):
        yield from _place_problems(name, [each for each in sized if each.kind in kinds], end, plan, known)


def _place_problems(name: str, inside: Sequence[Buffer], end: int, plan: Plan, known: _Known) -> Iterator[Problem]:
    """An arena of another size; places outside of it, off the alignment, or over each other while both are alive."""
    if len(inside) > MAX_PLACED:
        yield Problem(name, f"{len(inside)} buffers", f"at most {MAX_PLACED}")
        return
    by_place: list[tuple[int, int, str]] = []
    always = ((0, len(plan.launches)),)
    for each in inside:
        stop = each.offset + _nbytes(each)
        if type(each.offset) is not int or each.offset < 0 or each.offset % ALIGNMENT or stop > end:
            yield Problem(each.name, f"offset {each.offset}", f"a multiple of {ALIGNMENT} within {end} bytes")
            return
        by_place.append((each.offset, stop, each.name))
    by_place.sort()
    reached = aligned(max((stop for _, stop, _ in by_place), default=0))
    most = min(reached, sum(aligned(stop - start) for start, stop, _ in by_place))
    if end > most:  # that many bytes are allocated
        yield Problem(name, f"{end} bytes", f"at most {most}, which its buffers take")
    lives = {each.name: known.alive.get(each.name, ()) if each.kind is Kind.WORKSPACE else always for each in inside}
    for index, (_, stop, one) in enumerate(by_place):
        for start, _, other in by_place[index + 1 :]:
            if start >= stop:
                break
            if (one, other) in known.apart:
                continue
            if not meet(lives[one], lives[other]):
                known.apart.add((one, other))
            else:
                yield Problem(other, f"a place over {one}'s", "places apart for what lives at one time")


def _nbytes(buffer: Buffer) -> int:
    """Of one whose sizes are numbers."""
    return math.prod(map(int, buffer.shape)) * DTYPE_BYTES[buffer.dtype]
