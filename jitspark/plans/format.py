"""A plan's file: one canonical JSON object in four lines, which begins with the digest of the rest.

    {"digest":"<sha256>",
    "frame":{...},                                       what plans for other numbers of rows have in common
    "keys":["<target>-<host>/<kernel>/<recipe>",...],
    "plan":{...}}                                        this one's own: sizes, places, which key serves a launch

Writes plans, and takes a file apart once its digest is right; `reader` makes a plan of the parts. Equal parts are
written once and named by their place.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from jitspark.errors import PlanError
from jitspark.key import Key, canonical
from jitspark.plans.plan import SIZED, VERSION, Argument, Plan, ScalarArgument

MAX_PLAN_BYTES = 16 * 1024 * 1024

_LINES = (b'{"digest":', b'"frame":', b'"keys":', b'"plan":')
HEADER = {
    "geometry": str,
    "tp": int,
    "query_length": int,
    "rows": int,
    "target": str,
    "host": str,
    "workspace_bytes": int,
    "symmetric_bytes": int,
}
LAUNCH_COLUMNS = ("name", "part", "provider", "operation", "triggers_early")  # the same for any number of rows
BUFFER_COLUMNS = ("name", "kind", "dtype", "strides", "of")
SOURCE_COLUMNS = ("tensor", "layout", "tap", "shared")


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
        "sources": [[getattr(each, name) for name in SOURCE_COLUMNS] for each in sources.rows],
        "buffers": {name: [getattr(each, name) for each in plan.buffers] for name in BUFFER_COLUMNS}
        | {"source": origins}
        | {"shape": [None if each.kind in SIZED else each.shape for each in plan.buffers]},
        "arguments": arguments.rows,
        "launches": {name: [getattr(each, name) for each in plan.launches] for name in LAUNCH_COLUMNS}
        | {"arguments": launches},
    }
    sized = [each for each in plan.buffers if each.kind in SIZED]
    own = {
        "version": VERSION,
        "stage": plan.stage.value,
        **{name: getattr(plan, name) for name in HEADER},
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
    return keys_from(parsed(lines_of(content, where)[1], where), where)


def lines_of(content: bytes, where: str) -> tuple[bytes, bytes, bytes]:
    """Frame, keys and the plan's own part, once the digest over them is right."""
    first, _, rest = content.partition(b"\n")
    if first != b'%s"%s",' % (_LINES[0], hashlib.sha256(rest).hexdigest().encode()):
        raise plan_error(where, "a plan whose digest does not match its bytes", "an unchanged plan")
    lines = rest.split(b"\n")
    ends = (b",", b",", b"}")
    whole = len(lines) == 4 and not lines[3]
    if not whole or not all(
        line.startswith(name) and line.endswith(end)
        for line, name, end in zip(lines[:3], _LINES[1:], ends, strict=True)
    ):
        raise plan_error(where, "a plan with other fields", f"a plan of version {VERSION}")
    frame, keys, own = (line[len(name) : -1] for line, name in zip(lines[:3], _LINES[1:], strict=True))
    return frame, keys, own


def parsed(text: bytes, where: str) -> Any:
    """The values of a part. Raises PlanError for no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise plan_error(where, "a plan that is no JSON", f"a plan of version {VERSION}") from None


def keys_from(names: Any, where: str) -> tuple[Key, ...]:
    """Keys from their paths in a store. Raises PlanError."""
    try:
        return tuple(_key(name) for name in names)
    except (TypeError, ValueError, AttributeError):
        raise plan_error(
            where, "a plan with names that are no keys", "target-host/kernel/recipe for each entry"
        ) from None


def _key(text: str) -> Key:
    place, kernel, recipe = text.split("/")
    target, _, host = place.partition("-")
    return Key(target, host, kernel, recipe)


def plan_error(where: str, found: str, needed: str) -> PlanError:
    """That a plan file is no good, and what helps."""
    remedy = "Remove it and run `jitspark warm` for this deployment."
    return PlanError(where=where, found=found, needed=needed, remedy=remedy)
