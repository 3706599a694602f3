"""Whether a plan makes sense: on making, and on loading before anything trusts it. Standard library only.

Checked are names, roles, the order of writes and reads (those ahead of the launch before included), aliasing, places
in the arenas, and that each launch is served by the entry that it names.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from jitspark.errors import PlanError
from jitspark.plans.buffer_planner import ALIGNMENT, Interval, aligned, intervals, meet
from jitspark.plans.plan import CUTE, READS, Buffer, Kind, Launch, Plan, Size, TensorArgument
from jitspark.spec import DTYPE_BYTES

Alive = Mapping[str, tuple[Interval, ...]]

ROLES = ("in", "out", "inout", "part")
BEFORE = -1  # complete before the first launch

# whose content is there before the step begins
GIVEN = frozenset(Kind) - {Kind.OUTPUT, Kind.WORKSPACE}
READ_ONLY = frozenset((Kind.WEIGHT, Kind.PEERS))
SIZED = frozenset(Kind) - {Kind.WEIGHT, Kind.KV_CACHE}  # whose shapes depend on the number of rows
ARENAS = ((Kind.WORKSPACE,), (Kind.SYMMETRIC, Kind.SIGNAL))


@dataclass(frozen=True, slots=True)
class Problem:
    """Where a plan does not make sense: a launch or a buffer."""

    where: str
    found: str
    needed: str


@dataclass(frozen=True, slots=True)
class _Known:
    """What was found out about a frame: when buffers are alive, and which launches see one in another shape."""

    frame: object  # kept, so that its id stays its own
    alive: Alive
    viewing: tuple[int, ...]
    apart: set[tuple[str, str]] = field(default_factory=set)  # pairs that are never alive at one time


class PlanChecker:
    """Checks plans. What those of one frame share (names, and the order of reads and writes) is checked once."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def require(self, plan: Plan, where: str, frame: object = None) -> None:
        """Raise PlanError for the first problem of `plan`, which comes from `where`."""
        problem = next(self.problems(plan, frame), None)
        if problem is not None:
            raise PlanError(
                where=f"{where}: {problem.where}",
                found=problem.found,
                needed=problem.needed,
                remedy="Remove it and run `jitspark warm` for this deployment.",
            )

    def problems(self, plan: Plan, frame: object = None) -> Iterator[Problem]:
        """All that is wrong with `plan`. `frame` is the same object for plans that differ in sizes and keys alone."""
        known = self._known.get(id(frame))
        if known is None:
            yield from _frame_problems(plan)
            viewing = (i for i, each in enumerate(plan.launches) if any(a.shape is not None for a in each.tensors()))
            known = _Known(frame, intervals(plan.launches), tuple(viewing))
            if frame is not None:
                self._known[id(frame)] = known
        yield from _own_problems(plan, known)


def _frame_problems(plan: Plan) -> Iterator[Problem]:
    """Problems that plans for any number of rows would have."""
    named = plan.buffer_named()
    if len(named) != len(plan.buffers):
        yield Problem("buffers", "a name twice", "a name for each buffer")
    for each in plan.buffers:
        yield from _buffer_problems(each, named)
    yield from _launch_problems(plan.launches, named)
    yield from order_problems(plan.launches, named)


def _own_problems(plan: Plan, known: _Known) -> Iterator[Problem]:
    """Problems of sizes, places and keys."""
    served = {
        (each.operation, each.provider, id(each.key)): each for each in plan.launches
    }  # keys of a plan are one object each
    for launch in served.values():
        yield from _key_problems(plan, launch)
    named = plan.buffer_named()
    for index in known.viewing:
        for argument in plan.launches[index].tensors():
            yield from _view_problems(plan.launches[index].name, argument, named)
    for each in plan.buffers:
        if each.kind in SIZED and not _is_shape(each.shape):
            yield Problem(each.name, f"shape {list(each.shape)}", "sizes above 0, or names")
        if each.kind is Kind.PEERS and each.shape != (plan.tp,):
            yield Problem(each.name, f"shape {list(each.shape)}", f"an address for each of {plan.tp} ranks")
    yield from _place_problems(plan, known)


def _buffer_problems(buffer: Buffer, named: Mapping[str, Buffer]) -> Iterator[Problem]:
    if buffer.dtype not in DTYPE_BYTES:
        yield Problem(buffer.name, f"dtype {buffer.dtype!r}", f"one of {', '.join(DTYPE_BYTES)}")
    if buffer.strides is not None and len(buffer.strides) != len(buffer.shape):
        yield Problem(buffer.name, f"{len(buffer.strides)} strides for {len(buffer.shape)} axes", "one for each axis")
    if not _is_shape(buffer.shape):
        yield Problem(buffer.name, f"shape {list(buffer.shape)}", "sizes above 0, or names")
    mapped = named.get(buffer.of or "")
    if buffer.kind is Kind.PEERS and (mapped is None or mapped.kind not in ARENAS[1]):
        yield Problem(buffer.name, f"addresses of {buffer.of!r}", "those of a buffer that all ranks map")


def _is_shape(shape: Sequence[Size]) -> bool:
    return all(type(size) is str or (type(size) is int and size > 0) for size in shape)


def _launch_problems(launches: Sequence[Launch], named: Mapping[str, Buffer]) -> Iterator[Problem]:
    good: set[int] = set()  # arguments that are one object each wherever they stand
    for launch in launches:
        tensors = list(launch.tensors())
        names = {each.buffer for each in tensors}
        if len(names) != len(tensors) and any(each.role != "in" for each in tensors):
            twice = next(name for name in names if sum(each.buffer == name for each in tensors) > 1)
            yield Problem(launch.name, f"{twice} twice, and something written", "a buffer in one argument's place")
        for each in tensors:
            if id(each) not in good:
                good.add(id(each))
                yield from _argument_problems(launch.name, each, named)


def _argument_problems(launch: str, argument: TensorArgument, named: Mapping[str, Buffer]) -> Iterator[Problem]:
    buffer = named.get(argument.buffer)
    if buffer is None:
        yield Problem(launch, f"an unknown buffer {argument.buffer!r}", "a buffer of the plan")
    elif argument.role not in ROLES:
        yield Problem(launch, f"role {argument.role!r}", f"one of {', '.join(ROLES)}")
    elif argument.role != "in" and buffer.kind in READ_ONLY:
        yield Problem(launch, f"{buffer.name} written", f"a {buffer.kind} buffer that is only read")


def _key_problems(plan: Plan, launch: Launch) -> Iterator[Problem]:
    key = launch.key
    if (key is None) is (launch.provider == CUTE):
        yield Problem(launch.name, f"provider {launch.provider}, key {key}", f"a key for {CUTE}, and for nobody else")
    if key is not None and (key.kernel, key.target, key.host) != (launch.operation, plan.target, plan.host):
        yield Problem(launch.name, f"key {key}", f"a key of {launch.operation} for {plan.target}, {plan.host}")


def _view_problems(launch: str, argument: TensorArgument, named: Mapping[str, Buffer]) -> Iterator[Problem]:
    buffer, shape = named[argument.buffer], argument.shape
    if shape is None:
        return
    whole = buffer.strides is None and all(type(size) is int for size in (*shape, *buffer.shape))
    if not whole or math.prod(map(int, shape)) != math.prod(map(int, buffer.shape)):
        yield Problem(launch, f"{buffer.name} as {list(shape)}", f"as many elements as {list(buffer.shape)}")


def order_problems(launches: Sequence[Launch], named: Mapping[str, Buffer]) -> Iterator[Problem]:
    """Reads before anybody wrote, reads ahead of a launch that may not be complete, and outputs that nobody writes.

    A launch that waits first finds all before it complete. What it reads ahead of that must be complete when it can
    begin: two launches before, or as long ago as the launch before itself could begin, if that one lets it begin early.
    What is written early is complete a launch sooner than the rest.
    """
    last_write = {name: BEFORE for name, buffer in named.items() if buffer.kind in GIVEN}
    complete = BEFORE  # the last launch that is complete when this one begins
    for index, launch in enumerate(launches):
        writes = {}
        for each in launch.tensors():
            name = each.buffer
            written = last_write.get(name)
            if each.role != "in":
                sooner = each.early and each.role not in READS and not launch.triggers_early
                writes[name] = index - sooner
            if each.role not in READS:
                continue
            if written is None:
                yield Problem(launch.name, f"{name} read before it is written", "a launch before that writes it")
            elif each.early and written > complete:
                found = f"{name} read ahead of {launches[written].name}, which writes it"
                yield Problem(launch.name, found, "a launch between the two that waits first")
        last_write |= writes
        complete = complete if launch.triggers_early else index - 1
    for name, buffer in named.items():
        if buffer.kind is Kind.OUTPUT and name not in last_write:
            yield Problem(name, "an output that no launch writes", "a launch that writes it")


def _place_problems(plan: Plan, known: _Known) -> Iterator[Problem]:
    """Arenas of another size; places outside of them, off the alignment, or over each other while both are alive."""
    sizes = (plan.workspace_bytes, plan.symmetric_bytes)
    always = ((0, len(plan.launches)),)
    for name, kinds, end in zip(("workspace", "symmetric memory"), ARENAS, sizes, strict=True):
        inside = [each for each in plan.buffers if each.kind in kinds]
        for each in inside:
            if not _is_placed(each, end):
                yield Problem(each.name, f"offset {each.offset}", f"a multiple of {ALIGNMENT} within {end} bytes")
                return
        lives = {
            each.name: known.alive.get(each.name, ()) if each.kind is Kind.WORKSPACE else always for each in inside
        }
        by_place = sorted((each.offset, each.offset + _nbytes(each), each.name) for each in inside)
        reached = aligned(max((stop for _, stop, _ in by_place), default=0))
        most = min(reached, sum(aligned(stop - start) for start, stop, _ in by_place))
        if end > most:  # that many bytes are allocated
            yield Problem(name, f"{end} bytes", f"at most {most}, which its buffers take")
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


def _is_placed(buffer: Buffer, end: int) -> bool:
    good = type(buffer.offset) is int and buffer.offset >= 0 and buffer.offset % ALIGNMENT == 0
    sized = buffer.dtype in DTYPE_BYTES and all(type(size) is int for size in buffer.shape)
    return good and sized and buffer.offset + _nbytes(buffer) <= end


def _nbytes(buffer: Buffer) -> int:
    return math.prod(int(size) for size in buffer.shape) * DTYPE_BYTES[buffer.dtype]
