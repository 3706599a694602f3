"""Whether what plans for any number of rows have in common makes sense: names, roles, the order of writes and reads.

Those ahead of the launch before included. Standard library only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jitspark.plans.plan import (
    LAYOUTS,
    READS,
    SIZED,
    TAPS,
    Argument,
    Buffer,
    Kind,
    Launch,
    Plan,
    ScalarArgument,
    Size,
)
from jitspark.spec import DTYPE_BYTES

ROLES = ("in", "out", "inout", "part")
SCALARS = {"float32": None, "int32": 2**31, "int64": 2**63}  # dtypes of numbers; whole ones lie from -bound to below it
BEFORE = -1  # complete before the first launch

# whose content is there before the step begins
GIVEN = frozenset(Kind) - {Kind.OUTPUT, Kind.WORKSPACE}
READ_ONLY = frozenset((Kind.WEIGHT, Kind.PEERS))
STRIDED = frozenset((Kind.INPUT, Kind.KV_CACHE))  # which may have other strides than a compact tensor's
MAPPED = frozenset((Kind.SYMMETRIC, Kind.SIGNAL))  # by all ranks


@dataclass(frozen=True, slots=True)
class Problem:
    """Where a plan does not make sense: a launch or a buffer."""

    where: str
    found: str
    needed: str


def frame_problems(plan: Plan, good: dict[int, Buffer]) -> Iterator[Problem]:
    """Problems that plans for any number of rows would have.

    good: weights without one, by their ids, which stay theirs as they are kept; most buffers are, in many frames.
    """
    named = plan.buffer_named()
    if len(named) != len(plan.buffers):
        yield Problem("buffers", "a name twice", "a name for each buffer")
    if len({launch.name for launch in plan.launches}) != len(plan.launches):
        yield Problem("launches", "a name twice", "a name for each launch")
    for each in plan.buffers:
        if id(each) in good:
            continue
        problem = None
        for problem in _buffer_problems(each, named):
            yield problem
        if problem is None and each.kind is Kind.WEIGHT:
            good[id(each)] = each
    yield from _launch_problems(plan.launches, named)
    yield from order_problems(plan.launches, named)


def _buffer_problems(buffer: Buffer, named: Mapping[str, Buffer]) -> Iterator[Problem]:
    name, strides = buffer.name, buffer.strides
    if buffer.dtype not in DTYPE_BYTES:
        yield Problem(name, f"dtype {buffer.dtype!r}", f"one of {', '.join(DTYPE_BYTES)}")
    if strides is not None:
        if buffer.kind not in STRIDED:
            yield Problem(name, f"strides of a {buffer.kind} buffer", "a compact tensor")
        if len(strides) != len(buffer.shape) and buffer.kind not in SIZED:
            yield Problem(name, f"{len(strides)} strides for {len(buffer.shape)} axes", "one for each axis")
        if not is_shape(strides):
            yield Problem(name, f"strides {list(strides)}", "numbers of elements above 0, or names")
    if buffer.kind not in SIZED and not is_shape(buffer.shape):
        yield Problem(name, f"shape {list(buffer.shape)}", "sizes above 0, or names")
    yield from _address_problems(buffer, named)
    source = buffer.source
    if source and (buffer.kind is not Kind.WEIGHT or source.layout not in LAYOUTS or source.tap not in TAPS):
        found = f"a {buffer.kind} buffer from {source.tensor}, {source.layout}, {source.tap}"
        yield Problem(name, found, f"a weight; {', '.join(LAYOUTS)}; {' or '.join(TAPS)}")


def _address_problems(buffer: Buffer, named: Mapping[str, Buffer]) -> Iterator[Problem]:
    mapped = None if buffer.of is None else named.get(buffer.of)
    if buffer.kind is Kind.PEERS and (mapped is None or mapped.kind not in MAPPED):
        yield Problem(buffer.name, f"addresses of {buffer.of!r}", "those of a buffer that all ranks map")
    if buffer.kind is not Kind.PEERS and buffer.of is not None:
        yield Problem(buffer.name, f"addresses of {buffer.of!r}", f"a {buffer.kind} buffer, which holds none")


def is_shape(sizes: Sequence[Size]) -> bool:
    return all(type(size) is str or (type(size) is int and size > 0) for size in sizes)


def _launch_problems(launches: Sequence[Launch], named: Mapping[str, Buffer]) -> Iterator[Problem]:
    good: set[int] = set()  # arguments that are one object each wherever they stand
    for launch in launches:
        tensors = launch.tensors()
        names = {each.buffer for each in tensors}
        if len(names) != len(tensors) and any(each.role != "in" for each in tensors):
            twice = next(name for name in names if sum(each.buffer == name for each in tensors) > 1)
            yield Problem(launch.name, f"{twice} twice, and something written", "a buffer in one argument's place")
        for each in launch.arguments:
            if id(each) not in good:
                good.add(id(each))
                yield from _argument_problems(launch.name, each, named)


def _argument_problems(launch: str, argument: Argument, named: Mapping[str, Buffer]) -> Iterator[Problem]:
    if isinstance(argument, ScalarArgument):
        if not _is_number(argument):
            found = f"the number {argument.value!r} of dtype {argument.dtype!r}"
            yield Problem(launch, found, f"a name, or a number of dtype {', '.join(SCALARS)}")
        return
    buffer = named.get(argument.buffer)
    if buffer is None:
        yield Problem(launch, f"an unknown buffer {argument.buffer!r}", "a buffer of the plan")
    elif argument.role not in ROLES:
        yield Problem(launch, f"role {argument.role!r}", f"one of {', '.join(ROLES)}")
    elif argument.role != "in" and buffer.kind in READ_ONLY:
        yield Problem(launch, f"{buffer.name} written", f"a {buffer.kind} buffer that is only read")


def _is_number(argument: ScalarArgument) -> bool:
    value, dtype = argument.value, argument.dtype
    if dtype not in SCALARS or type(value) is bool:
        return False
    bound = SCALARS[dtype]
    if isinstance(value, str):
        return True
    return type(value) is float if bound is None else type(value) is int and -bound <= value < bound


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
            name, role = each.buffer, each.role
            if role != "in":
                sooner = each.early and role not in READS and not launch.triggers_early
                writes[name] = index - sooner
            if role not in READS:
                continue
            written = last_write.get(name)
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
