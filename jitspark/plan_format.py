"""A plan as bytes and back: one canonical JSON object in four lines, which begins with the digest of the rest.

    {"digest":"<sha256>",
    "frame":{...},                                       what plans for other numbers of rows have in common
    "keys":["<target>-<host>/<kernel>/<recipe>",...],
    "plan":{...}}                                        this one's own: sizes, places, which key serves a launch

Equal parts are written once and named by their place; a frame that was read before is not read again. What is read is
checked for its digest, its version and its form; whether it makes sense is for `plan_checks`.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from jitspark.errors import PlanError
from jitspark.key import Key, canonical
from jitspark.plan import (
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

MAX_PLAN_BYTES = 16 * 1024 * 1024

_LINES = (b'{"digest":', b'"frame":', b'"keys":', b'"plan":')
_HEADER = {
    "geometry": str,
    "tp": int,
    "query_length": int,
    "rows": int,
    "target": str,
    "host": str,
    "workspace_bytes": int,
    "symmetric_bytes": int,
}
_LAUNCH = ("name", "part", "provider", "operation", "triggers_early")  # the same for any number of rows
_BUFFER = ("name", "kind", "dtype", "strides", "of")
_SOURCE = ("tensor", "layout", "tap", "shared")
_KINDS = {kind.value: kind for kind in Kind}
# whose shapes depend on the number of rows, or who have a place in an arena
_SIZED = (Kind.INPUT, Kind.OUTPUT, Kind.WORKSPACE, Kind.SYMMETRIC, Kind.PEERS, Kind.SIGNAL)


def to_bytes(plan: Plan) -> bytes:
    """`plan` as it is stored. The same plan gives the same bytes."""
    keys = plan.keys()
    frame, own = _contents(plan, keys)
    parts = (frame, [key.path for key in keys], own)
    lines = [name + canonical(part) for name, part in zip(_LINES[1:], parts, strict=True)]
    rest = b",\n".join(lines) + b"}\n"
    return b'%s"%s",\n%s' % (_LINES[0], hashlib.sha256(rest).hexdigest().encode(), rest)


def _contents(plan: Plan, keys: Sequence[Key]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The frame, and the plan's own part."""
    sources, arguments, statics, views = _Table(), _Table(), _Table(), _Table()
    place = {buffer.name: index for index, buffer in enumerate(plan.buffers)}
    places: dict[Key | None, int | None] = {None: None, **{key: index for index, key in enumerate(keys)}}

    def argument_place(argument: Argument) -> int:
        if isinstance(argument, ScalarArgument):
            return arguments.place([argument.value, argument.dtype])
        view = None if argument.shape is None else views.place(argument.shape)
        return arguments.place([place[argument.buffer], argument.role, argument.early, view])

    launches = [[argument_place(argument) for argument in launch.arguments] for launch in plan.launches]
    origins = [None if each.source is None else sources.place(each.source) for each in plan.buffers]
    frame = {
        "sources": [[getattr(each, name) for name in _SOURCE] for each in sources.rows],
        "buffers": {name: [getattr(each, name) for each in plan.buffers] for name in _BUFFER}
        | {"source": origins}
        | {"shape": [None if each.kind in _SIZED else each.shape for each in plan.buffers]},
        "arguments": arguments.rows,
        "launches": {name: [getattr(each, name) for each in plan.launches] for name in _LAUNCH}
        | {"arguments": launches},
    }
    sized = [each for each in plan.buffers if each.kind in _SIZED]
    own = {
        "version": VERSION,
        "stage": plan.stage.value,
        **{name: getattr(plan, name) for name in _HEADER},
        "providers": plan.providers,
        "shapes": [each.shape for each in sized],
        "offsets": [each.offset for each in sized],
        "views": views.rows,
        "keys": [places[launch.key] for launch in plan.launches],
        "launch_statics": [statics.place(dict(launch.statics)) for launch in plan.launches],
        "statics": statics.rows,
    }
    return frame, own


class _Table:
    """Values, each once, by their place."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self._places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        name = repr(value)  # 1, 1.0 and True are equal, and not the same
        if name not in self._places:
            self._places[name] = len(self.rows)
            self.rows.append(value)
        return self._places[name]


def digest_in(content: bytes) -> str:
    """The digest that a plan file bears."""
    start = len(_LINES[0]) + 1
    return content[start : start + 64].decode("ascii", "replace")


def keys_in(content: bytes, where: str) -> tuple[Key, ...]:
    """The keys of a plan file, without reading the rest of it. Raises PlanError."""
    return _keys(_load(_lines(content, where)[1], where), where)


@dataclass(frozen=True, slots=True)
class Frame:
    """What plans for different numbers of rows share. Plans of one frame differ in no order of reads and writes."""

    buffers: tuple[Buffer, ...]
    sized: tuple[int, ...]
    arguments: tuple[tuple[Argument, ...], ...]
    views: tuple[tuple[int, tuple[int | None, ...]], ...]  # launches that see a buffer in another shape: which one
    columns: tuple[Sequence[Any], ...]


class PlanReader:
    """Reads plans, and a frame that several of them have only once."""

    def __init__(self) -> None:
        self._frames: dict[bytes, Frame] = {}

    def read(self, content: bytes, where: str) -> tuple[Plan, Frame]:
        """The plan in `content`, and its frame. Raises PlanError that names what is wrong."""
        frame_text, keys_text, own_text = _lines(content, where)
        keys, own = _keys(_load(keys_text, where), where), _load(own_text, where)
        version = own.get("version") if isinstance(own, dict) else None
        if version != VERSION:
            raise _error(where, f"a plan of version {version!r}"[:200], f"a plan of version {VERSION}")
        try:
            frame = self._frames.get(frame_text)
            if frame is None:
                frame = self._frames[frame_text] = _frame(_load(frame_text, where))
            return _plan(frame, own, keys), frame
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as problem:
            found = f"no plan: {type(problem).__name__} {problem}"[:300]
            raise _error(where, found, f"a plan of version {VERSION}") from None


def _frame(body: Mapping[str, Any]) -> Frame:
    sources = [WeightSource(*row) for row in body["sources"]]
    table = body["buffers"]
    _require(str, table["name"], table["dtype"], *(body["launches"][name] for name in _LAUNCH[:-1]))
    _require(bool, body["launches"]["triggers_early"])
    rows = _rows(*(table[name] for name in (*_BUFFER, "source", "shape")))
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
    columns = tuple(launches[name] for name in _LAUNCH)
    if {len(each) for each in columns} != {len(places)}:
        raise ValueError("columns of different lengths")
    return Frame(
        buffers=buffers,
        sized=tuple(index for index, each in enumerate(buffers) if each.kind in _SIZED),
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


def _plan(frame: Frame, own: Mapping[str, Any], keys: Sequence[Key]) -> Plan:
    buffers = list(frame.buffers)
    for index, shape, offset in _rows(frame.sized, own["shapes"], own["offsets"]):
        was = buffers[index]
        buffers[index] = Buffer(was.name, was.kind, tuple(shape), was.dtype, was.strides, offset, was.of, was.source)
    statics = [MappingProxyType({name: _number(item) for name, item in row.items()}) for row in own["statics"]]
    chosen = [_at(statics, index) for index in own["launch_statics"]]
    for name, kind in _HEADER.items():
        _require(kind, [own[name]])
    _require(str, own["providers"].values())
    names, parts, providers, operations, triggers = frame.columns
    served = [_at(keys, index) for index in own["keys"]]
    arguments = _seen(frame, [tuple(shape) for shape in own["views"]])
    columns = (names, parts, providers, operations, served, arguments, chosen, triggers)
    if {len(each) for each in columns} != {len(names)}:
        raise ValueError("columns of different lengths")
    return Plan(
        stage=Stage(own["stage"]),
        providers=own["providers"],
        buffers=tuple(buffers),
        launches=tuple(map(Launch, *columns)),
        **{name: own[name] for name in _HEADER},
    )


def _seen(frame: Frame, shapes: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Argument, ...]]:
    """Each launch's arguments, in the shapes that it sees."""
    found = list(frame.arguments)
    for launch, views in frame.views:
        found[launch] = tuple(
            argument if view is None else replace(argument, shape=_at(shapes, view))
            for argument, view in zip(found[launch], views, strict=True)
        )
    return found


def _lines(content: bytes, where: str) -> tuple[bytes, bytes, bytes]:
    """Frame, keys and the plan's own part, once the digest over them is right."""
    first, _, rest = content.partition(b"\n")
    if first != b'%s"%s",' % (_LINES[0], hashlib.sha256(rest).hexdigest().encode()):
        raise _error(where, "a plan whose digest does not match its bytes", "an unchanged plan")
    lines = rest.split(b"\n")
    ends = (b",", b",", b"}")
    whole = len(lines) == 4 and not lines[3]
    if not whole or not all(
        line.startswith(name) and line.endswith(end)
        for line, name, end in zip(lines[:3], _LINES[1:], ends, strict=True)
    ):
        raise _error(where, "a plan with other fields", f"a plan of version {VERSION}")
    frame, keys, own = (line[len(name) : -1] for line, name in zip(lines[:3], _LINES[1:], strict=True))
    return frame, keys, own


def _load(text: bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _error(where, "a plan that is no JSON", f"a plan of version {VERSION}") from None


def _keys(names: Any, where: str) -> tuple[Key, ...]:
    try:
        return tuple(_key(name) for name in names)
    except (TypeError, ValueError, AttributeError):
        raise _error(where, "a plan with names that are no keys", "target-host/kernel/recipe for each entry") from None


def _key(text: str) -> Key:
    place, kernel, recipe = text.split("/")
    target, _, host = place.partition("-")
    return Key(target, host, kernel, recipe)


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


def _error(where: str, found: str, needed: str) -> PlanError:
    remedy = "Remove it and run `jitspark warm` for this deployment."
    return PlanError(where=where, found=found, needed=needed, remedy=remedy)
