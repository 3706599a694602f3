"""Plans from their files. A frame that was read before is not read again, nor is a buffer made twice.

What is read is checked for its digest, its version and its form (`form`); whether it makes sense is for `checks`.
"""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from jitspark.key import Key
from jitspark.plans.form import FormError, exact_float, require_frame, require_own
from jitspark.plans.format import BUFFER_COLUMNS, HEADER, LAUNCH_COLUMNS, keys_from, lines_of, parsed, plan_error
from jitspark.plans.plan import (
    SIZED,
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
_Views = tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """What plans for different numbers of rows share. Plans of one frame differ in no order of reads and writes."""

    buffers: tuple[Buffer, ...]
    sized: tuple[int, ...]
    arguments: tuple[tuple[Argument, ...], ...]
    views: tuple[tuple[int, _Views], ...]  # launches that see a buffer in another shape: which one
    columns: tuple[Sequence[Any], ...]
    # launches so far by place, key and statics (by identity): many are the same for several numbers of rows
    made: dict[tuple[int, int, int], Launch] = field(default_factory=dict, compare=False)

    @property
    def seen(self) -> int:
        """How many shapes its launches see other than buffers' own."""
        return 1 + max((view for _, each in self.views for view in each if view is not None), default=-1)


class PlanReader:
    """Reads plans, and a frame that several of them have only once."""

    def __init__(self) -> None:
        self._frames: dict[bytes, Frame] = {}
        self._shared: dict[Any, Any] = {}  # keys, statics, sources and buffers, each one object

    def read(self, content: bytes, where: str) -> tuple[Plan, Frame]:
        """The plan in `content`, and its frame. Raises PlanError that names what is wrong."""
        frame_text, keys_text, own_text = lines_of(content, where)
        names, own = parsed(keys_text, where), parsed(own_text, where)
        version = own.get("version") if type(own) is dict else None
        if type(version) is not int or version != VERSION:
            raise plan_error(where, f"a plan of version {reprlib.repr(version)}", f"a plan of version {VERSION}")
        keys = [self._shared.setdefault(key, key) for key in keys_from(names, where)]
        try:
            frame = self._frames.get(frame_text)
            if frame is None:
                frame = self._frames[frame_text] = self._frame(parsed(frame_text, where))
            places = {"sized": len(frame.sized), "launches": len(frame.arguments), "views": frame.seen}
            require_own(own, **places, keys=len(keys))
            return _plan(frame, own, keys, [self._statics(row) for row in own["statics"]]), frame
        except FormError as problem:
            raise plan_error(where, f"no plan: {problem.found}", problem.needed) from None

    def _statics(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        name = repr(row)
        found: Mapping[str, Any] | None = self._shared.get(name)
        if found is None:
            found = self._shared[name] = MappingProxyType({each: _number(item) for each, item in row.items()})
        return found

    def _frame(self, body: Mapping[str, Any]) -> Frame:
        require_frame(body)
        buffers, launches = self._buffers(body["buffers"], body["sources"]), body["launches"]
        arguments = [_argument(row, buffers) for row in body["arguments"]]
        views = [row[3] if len(row) == 4 else None for row in body["arguments"]]
        viewing = {place for place, view in enumerate(views) if view is not None}
        return Frame(
            buffers=buffers,
            sized=tuple(index for index, each in enumerate(buffers) if each.kind in SIZED),
            arguments=tuple([tuple([arguments[place] for place in each]) for each in launches["arguments"]]),
            views=tuple(
                (index, tuple([views[place] for place in each]))
                for index, each in enumerate(launches["arguments"])
                if not viewing.isdisjoint(each)
            ),
            columns=tuple(launches[name] for name in LAUNCH_COLUMNS),
        )

    def _buffers(self, table: Mapping[str, Sequence[Any]], rows: Sequence[Sequence[Any]]) -> tuple[Buffer, ...]:
        """Frames that differ in some launches have most buffers alike."""
        made = self._shared
        sources = [made.setdefault(each, each) for each in (WeightSource(*row) for row in rows)]
        columns = {name: table[name] for name in BUFFER_COLUMNS} | {"strides": map(_tuple, table["strides"])}
        found: list[Buffer] = []
        for *row, place, shape in zip(*columns.values(), table["source"], table["shape"], strict=True):
            source = None if place is None else sources[place]
            name = (*row, id(source), None if shape is None else tuple(shape))
            buffer = made.get(name)
            if buffer is None:
                label, kind, dtype, strides, of = row
                buffer = Buffer(label, _KINDS[kind], tuple(shape or ()), dtype, strides, 0, of, source)
                made[name] = buffer
            found.append(buffer)
        return tuple(found)


def _argument(row: Sequence[Any], buffers: Sequence[Buffer]) -> Argument:
    """A number and its dtype, or a buffer's place, role, early, and a view's place."""
    if len(row) == 2:
        return ScalarArgument(_number(row[0]), row[1])
    return TensorArgument(buffers[row[0]].name, row[1], row[2])


def _plan(frame: Frame, own: Mapping[str, Any], keys: Sequence[Key], statics: Sequence[Mapping[str, Any]]) -> Plan:
    buffers = list(frame.buffers)
    for index, shape, offset in zip(frame.sized, own["shapes"], own["offsets"], strict=True):
        was = buffers[index]
        buffers[index] = Buffer(was.name, was.kind, tuple(shape), was.dtype, was.strides, offset, was.of, was.source)
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
    for index, (key_place, place) in enumerate(zip(own["keys"], own["launch_statics"], strict=True)):
        key, chosen = None if key_place is None else keys[key_place], statics[place]
        name = (index, id(key), id(chosen))
        launch = frame.made.get(name)
        if launch is None:
            label, part, provider, operation, early = [column[index] for column in frame.columns]
            launch = Launch(label, part, provider, operation, key, frame.arguments[index], chosen, early)
            frame.made[name] = launch
        launches.append(launch)
    shapes = [tuple(shape) for shape in own["views"]]
    for index, views in frame.views:
        launches[index] = replace(launches[index], arguments=_seen(frame.arguments[index], views, shapes))
    return tuple(launches)


def _seen(arguments: Sequence[Argument], views: _Views, shapes: Sequence[tuple[Any, ...]]) -> tuple[Argument, ...]:
    """A launch's arguments, in the shapes that it sees."""
    return tuple(
        argument if view is None or isinstance(argument, ScalarArgument) else replace(argument, shape=shapes[view])
        for argument, view in zip(arguments, views, strict=True)
    )


def _number(value: Any) -> bool | int | float | str:
    """Canonical JSON writes floats by their exact value."""
    made: bool | int | float | str = exact_float(value) if type(value) is dict else value
    return made


def _tuple(items: Sequence[Any] | None) -> tuple[Any, ...] | None:
    return None if items is None else tuple(items)
