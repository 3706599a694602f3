"""The form of a plan file's parts: which values may stand where, looked at before anything is made of them.

Tables are columns, and a column is looked at as a whole. What the values mean together is for `checks`. Whatever stands
in a file, the answer is a FormError or none, and takes no more memory than the file.
"""

import itertools
import math
import reprlib
from collections.abc import Collection, Mapping
from typing import Any

from jitspark.plans.format import BUFFER_COLUMNS, HEADER, LAUNCH_COLUMNS, SOURCE_COLUMNS
from jitspark.plans.plan import SIZED, Kind, Stage

MAX_TEXT = 200  # characters; names are a few dozen long, and stand in messages
MAX_AXES = 8
MAX_INT = 2**63  # kernels take 64 bits at most

_KINDS = frozenset(kind.value for kind in Kind)
_SIZED = frozenset(kind.value for kind in SIZED)
_OWN = ("version", "stage", *HEADER, "providers", "shapes", "offsets", "views", "keys", "launch_statics", "statics")
_STAGES = frozenset(stage.value for stage in Stage)


class FormError(ValueError):
    """A part of a plan's file has another form: what was found, and what a plan has there."""

    def __init__(self, found: str, needed: str) -> None:
        super().__init__(found, needed)
        self.found, self.needed = found, needed


def require_frame(body: Any) -> None:
    """Raise FormError unless `body` is what plans for several numbers of rows can have in common."""
    _table(body, "frame", ("arguments", "buffers", "launches", "sources"))
    buffers, launches = body["buffers"], body["launches"]
    _columns(buffers, "buffers", (*BUFFER_COLUMNS, "source", "shape"))
    _columns(launches, "launches", (*LAUNCH_COLUMNS, "arguments"))
    _require_sources(body["sources"])
    _require_texts(buffers["name"], "buffers.name")
    _require_texts(buffers["dtype"], "buffers.dtype")
    _require_among(buffers["kind"], "buffers.kind", _KINDS)
    _require_texts(_given(buffers["of"]), "buffers.of")
    _require_places(_given(buffers["source"]), "buffers.source", len(body["sources"]))
    _require_shapes(_given(buffers["shape"]), "buffers.shape")
    if [kind in _SIZED for kind in buffers["kind"]] != [shape is None for shape in buffers["shape"]]:
        raise _wrong("buffers.shape", "shapes of other buffers", "those that are the same for any number of rows")
    _require_shapes(_given(buffers["strides"]), "buffers.strides")
    _require_arguments(body["arguments"], len(buffers["name"]))
    for name in LAUNCH_COLUMNS[:-1]:
        _require_texts(launches[name], f"launches.{name}")
    _require_only(launches["triggers_early"], "launches.triggers_early", bool)
    _require_only(launches["arguments"], "launches.arguments", list)
    flat = list(itertools.chain.from_iterable(launches["arguments"]))
    _require_places(flat, "launches.arguments", len(body["arguments"]))


def require_own(body: Any, *, sized: int, launches: int, keys: int, views: int) -> None:
    """Raise FormError unless `body` is one plan's own part, behind a frame with so many sized buffers and launches.

    keys: that the file names. views: one more than the last place of a view in the frame.
    """
    _table(body, "plan", _OWN)
    for name, kind in HEADER.items():
        (_require_texts if kind is str else _require_ints)([body[name]], f"plan.{name}")
    _require_among([body["stage"]], "plan.stage", _STAGES)
    if min(body["tp"], body["query_length"], body["rows"]) < 1:
        raise _wrong("plan", "a size below 1", "at least a rank, a row and a token")
    if min(body["workspace_bytes"], body["symmetric_bytes"]) < 0:
        raise _wrong("plan", "an arena below 0 bytes", "sizes of arenas")
    _require_named(body["providers"], "plan.providers")
    _require_texts(list(body["providers"].values()), "plan.providers")
    _require_length(body["shapes"], "plan.shapes", sized)
    _require_shapes(body["shapes"], "plan.shapes")
    _require_length(body["offsets"], "plan.offsets", sized)
    _require_ints(body["offsets"], "plan.offsets")
    _require_shapes(body["views"], "plan.views")
    if len(body["views"]) < views:
        raise _wrong("plan.views", f"{len(body['views'])} shapes", f"the {views} that launches see")
    _require_length(body["keys"], "plan.keys", launches)
    _require_places(_given(body["keys"]), "plan.keys", keys)
    _require_only(body["statics"], "plan.statics", dict)
    _require_texts(list(itertools.chain.from_iterable(body["statics"])), "plan.statics")
    _require_numbers([item for row in body["statics"] for item in row.values()], "plan.statics")
    _require_length(body["launch_statics"], "plan.launch_statics", launches)
    _require_places(body["launch_statics"], "plan.launch_statics", len(body["statics"]))


def exact_float(value: Mapping[str, str]) -> float:
    """A float as canonical JSON holds it, by its exact value. Raises FormError for what is none, or not finite."""
    exact = value.get("float") if len(value) == 1 else None
    try:
        made = float.fromhex(exact) if type(exact) is str else math.nan
    except (ValueError, OverflowError):
        made = math.nan
    if not math.isfinite(made):
        raise _wrong("a float", reprlib.repr(value), "its exact value")
    return made


def _require_sources(rows: Any) -> None:
    _require_only(rows, "sources", list)
    if any(len(row) != len(SOURCE_COLUMNS) for row in rows):
        raise _wrong("sources", "a row of another length", ", ".join(SOURCE_COLUMNS))
    for index, name in enumerate(SOURCE_COLUMNS):
        column = [row[index] for row in rows]
        if name == "shared":
            _require_only(column, "sources.shared", bool)
        else:
            _require_texts(column, f"sources.{name}")


def _require_arguments(rows: Any, buffers: int) -> None:
    """A number and its dtype, or a buffer's place, role, early, and a view's place."""
    _require_only(rows, "arguments", list)
    tensors = [row for row in rows if len(row) == 4]
    numbers = [row for row in rows if len(row) == 2]
    if len(tensors) + len(numbers) != len(rows):
        raise _wrong("arguments", "a row of another length", "2 values of a number, or 4 of a buffer")
    _require_texts([row[1] for row in rows], "arguments")
    _require_places([row[0] for row in tensors], "arguments", buffers)
    _require_only([row[2] for row in tensors], "arguments", bool)
    _require_places(_given([row[3] for row in tensors]), "arguments", MAX_INT)
    _require_numbers([row[0] for row in numbers], "arguments")


def _table(value: Any, where: str, names: Collection[str]) -> None:
    if type(value) is not dict or value.keys() != set(names):
        raise _wrong(where, reprlib.repr(value), f"a table of {', '.join(names)}")


def _columns(value: Any, where: str, names: Collection[str]) -> None:
    """All of one length."""
    _table(value, where, names)
    _require_only(list(value.values()), where, list)
    if len({len(column) for column in value.values()}) != 1:
        raise _wrong(where, "columns of different lengths", "a value in each column")


def _require_named(value: Any, where: str) -> None:
    if type(value) is not dict:
        raise _wrong(where, reprlib.repr(value), "values by name")
    _require_texts(list(value), where)


def _require_length(column: Any, where: str, length: int) -> None:
    if type(column) is not list or len(column) != length:
        raise _wrong(where, reprlib.repr(column), f"a list of {length}")


def _given(column: Any) -> Any:
    return [each for each in column if each is not None] if type(column) is list else column


def _require_only(column: Any, where: str, *kinds: type) -> None:
    if type(column) is not list or not set(map(type, column)).issubset(kinds):
        raise _wrong(where, reprlib.repr(column), f"a list of {' or '.join(kind.__name__ for kind in kinds)} alone")


def _require_texts(column: Any, where: str) -> None:
    """Short, and such as can be shown."""
    _require_only(column, where, str)
    if column and not (all(column) and max(map(len, column)) <= MAX_TEXT and "".join(column).isprintable()):
        raise _wrong(where, reprlib.repr(column), f"texts of 1 to {MAX_TEXT} characters that can be printed")


def _require_among(column: Any, where: str, known: frozenset[str]) -> None:
    _require_only(column, where, str)
    if not known.issuperset(column):
        raise _wrong(where, reprlib.repr(sorted(set(column) - known)), f"one of {', '.join(sorted(known))}")


def _require_ints(column: Any, where: str) -> None:
    _require_only(column, where, int)
    if column and (min(column) < -MAX_INT or max(column) >= MAX_INT):
        raise _wrong(where, "an integer of more than 64 bits", "integers of 64 bits")


def _require_numbers(column: Any, where: str) -> None:
    """Truths, integers, floats by their exact value, and texts."""
    _require_only(column, where, bool, int, str, dict)
    _require_texts([each for each in column if type(each) is str], where)
    _require_ints([each for each in column if type(each) is int], where)
    for each in column:
        if type(each) is dict:
            exact_float(each)


def _require_places(column: Any, where: str, end: int) -> None:
    _require_only(column, where, int)
    if column and (min(column) < 0 or max(column) >= end):
        raise _wrong(where, "a place out of the table", f"places below {end}")


def _require_shapes(column: Any, where: str) -> None:
    """Lists of sizes, each an integer or a name."""
    _require_only(column, where, list)
    if max(map(len, column), default=0) > MAX_AXES:
        raise _wrong(where, "too many axes", f"{MAX_AXES} at most")
    flat = list(itertools.chain.from_iterable(column))
    _require_only(flat, where, int, str)
    _require_texts([each for each in flat if type(each) is str], where)
    _require_ints([each for each in flat if type(each) is int], where)


def _wrong(where: str, found: str, needed: str) -> FormError:
    return FormError(f"{where}: {found}", needed)
