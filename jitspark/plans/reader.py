"""Plans from their files. A frame that was read before is not read again.

What is read is checked for its digest, its version and its form; whether it makes sense is for `plan_checks`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from jitspark.key import Key
from jitspark.plans.format import BUFFER_COLUMNS, HEADER, LAUNCH_COLUMNS, SIZED, keys_from, lines_of, parsed, plan_error
from jitspark.plans.plan import (
    VERSION,
    Argument,
    Buffer,
    Kind,
    Launch,
    Plan,
    ScalarArgument,
    Stage,
    TensorArgument,
    WeightSource,
)

_KINDS = {kind.value: kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Frame:
    """What plans for different numbers of rows share. Plans of one frame differ in no order of reads and writes."""

    buffers: tuple[Buffer, ...]
    sized: tuple[int, ...]
    arguments: tuple[tuple[Argument, ...], ...]
    views: tuple[tuple[int, tuple[int | None, ...]], ...]  # launches that see a buffer in another shape: which one
    columns: tuple[Sequence[Any], ...]
    # launches so far by place, key and statics (by identity): many are the same for several numbers of rows
    made: dict[tuple[int, int, int], Launch] = field(default_factory=dict, compare=False)


class PlanReader:
    """Reads plans, and a frame that several of them have only once."""

    def __init__(self) -> None:
        self._frames: dict[bytes, Frame] = {}
        self._shared: dict[Any, Any] = {}  # keys and statics, each one object

    def read(self, content: bytes, where: str) -> tuple[Plan, Frame]:
        """The plan in `content`, and its frame. Raises PlanError that names what is wrong."""
        frame_text, keys_text, own_text = lines_of(content, where)
        keys, own = keys_from(parsed(keys_text, where), where), parsed(own_text, where)
        version = own.get("version") if isinstance(own, dict) else None
        if version != VERSION:
            raise plan_error(where, f"a plan of version {version!r}"[:200], f"a plan of version {VERSION}")
        try:
            frame = self._frames.get(frame_text)
            if frame is None:
                frame = self._frames[frame_text] = _frame(parsed(frame_text, where))
            statics = [self._statics(row) for row in own["statics"]]
            return _plan(frame, own, [self._shared.setdefault(key, key) for key in keys], statics), frame
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:
            found = f"no plan: {type(problem).__name__} {problem}"[:300]
            raise plan_error(where, found, f"a plan of version {VERSION}") from None

    def _statics(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        name = repr(row)
        if name not in self._shared:
            self._shared[name] = MappingProxyType({each: _number(item) for each, item in row.items()})
        found: Mapping[str, Any] = self._shared[name]
        return found


def _frame(body: Mapping[str, Any]) -> Frame:
    sources = [WeightSource(*row) for row in body["sources"]]
    table = body["buffers"]
    _require(str, table["name"], table["dtype"], *(body["launches"][name] for name in LAUNCH_COLUMNS[:-1]))
    _require(bool, body["launches"]["triggers_early"])
    rows = _rows(*(table[name] for name in (*BUFFER_COLUMNS, "source", "shape")))
    buffers = tuple(
        [
            Buffer(name, _KINDS[kind], tuple(shape or ()), dtype, _tuple(strides), 0, of, _at(sources, source))
            for name, kind, dtype, strides, of, source, shape in rows
        ]
    )
    arguments = _arguments(body["arguments"], table["name"])
    views = [row[3] if len(row) == 4 else None for row in body["arguments"]]
    launches = body["launches"]
    places: list[list[int]] = launches["arguments"]
    if min((min(each, default=0) for each in places), default=0) < 0:
        raise IndexError("a place below 0")
    columns = tuple(launches[name] for name in LAUNCH_COLUMNS)
    if {len(each) for each in columns} != {len(places)}:
        raise ValueError("columns of different lengths")
    return Frame(
        buffers=buffers,
        sized=tuple(index for index, each in enumerate(buffers) if each.kind in SIZED),
        arguments=tuple(tuple([arguments[index] for index in each]) for each in places),
        views=tuple(
            (launch, tuple(views[index] for index in each))
            for launch, each in enumerate(places)
            if any(views[index] is not None for index in each)
        ),
        columns=columns,
    )


def _arguments(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> list[Argument]:
    """The table of arguments: a number and its dtype, or a buffer's place, role, early, and a view's place."""
    buffers = [row for row in rows if len(row) == 4]
    _require(str, [row[1] for row in rows])
    _require(bool, [row[2] for row in buffers])
    if min((row[0] for row in buffers), default=0) < 0:
        raise IndexError("a place below 0")
    return [
        ScalarArgument(_number(row[0]), row[1]) if len(row) == 2 else TensorArgument(names[row[0]], row[1], row[2])
        for row in rows
    ]


def _plan(frame: Frame, own: Mapping[str, Any], keys: Sequence[Key], statics: Sequence[Mapping[str, Any]]) -> Plan:
    buffers = list(frame.buffers)
    for index, shape, offset in _rows(frame.sized, own["shapes"], own["offsets"]):
        was = buffers[index]
        buffers[index] = Buffer(was.name, was.kind, tuple(shape), was.dtype, was.strides, offset, was.of, was.source)
    for name, kind in HEADER.items():
        _require(kind, [own[name]])
    _require(str, own["providers"].values())
    if min(own["tp"], own["query_length"], own["rows"]) < 1 or min(own["workspace_bytes"], own["symmetric_bytes"]) < 0:
        raise ValueError("a size that none can have")
    return Plan(
        stage=Stage(own["stage"]),
        providers=own["providers"],
        buffers=tuple(buffers),
        launches=_launches(frame, own, keys, statics),
        **{name: own[name] for name in HEADER},
    )


def _launches(
    frame: Frame, own: Mapping[str, Any], keys: Sequence[Key], statics: Sequence[Mapping[str, Any]]
) -> tuple[Launch, ...]:
    """The plan's launches; those that a plan of the same frame has had already are taken from it."""
    launches: list[Launch] = []
    for index, (key_place, place) in enumerate(_rows(own["keys"], own["launch_statics"])):
        key, chosen = _at(keys, key_place), _at(statics, place)
        name = (index, id(key), id(chosen))
        launch = frame.made.get(name)
        if launch is None:
            label, part, provider, operation, early = [column[index] for column in frame.columns]
            launch = Launch(label, part, provider, operation, key, frame.arguments[index], chosen, early)
            frame.made[name] = launch
        launches.append(launch)
    if len(launches) != len(frame.arguments):
        raise ValueError("keys for another number of launches")
    shapes = [tuple(shape) for shape in own["views"]]
    for index, views in frame.views:
        launches[index] = replace(launches[index], arguments=_seen(frame.arguments[index], views, shapes))
    return tuple(launches)


def _seen(
    arguments: Sequence[Argument], views: Sequence[int | None], shapes: Sequence[tuple[Any, ...]]
) -> tuple[Argument, ...]:
    """A launch's arguments, in the shapes that it sees."""
    return tuple(
        argument if view is None or isinstance(argument, ScalarArgument) else replace(argument, shape=_at(shapes, view))
        for argument, view in zip(arguments, views, strict=True)
    )


def _require(kind: type, *columns: Iterable[Any]) -> None:
    for column in columns:
        if set(map(type, column)) - {kind}:
            raise TypeError(f"something that is no {kind.__name__}")


def _rows(*columns: Sequence[Any]) -> "zip[tuple[Any, ...]]":
    return zip(*columns, strict=True)


def _at(items: Sequence[Any], index: int | None) -> Any:
    """The item at a place, or None for no place."""
    if index is None:
        return None
    if type(index) is not int or index < 0:
        raise IndexError(f"the place {index!r:.40}")
    return items[index]


def _tuple(items: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if items is None else tuple(items)


def _number(value: Any) -> bool | int | float | str:
    """Canonical JSON writes floats by their exact value."""
    made = float.fromhex(value["float"]) if isinstance(value, dict) else value
    if not isinstance(made, (bool, int, float, str)):
        raise TypeError(f"{value!r:.40} is no number")
    return made
