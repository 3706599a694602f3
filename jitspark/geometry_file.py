"""Reads one geometry file into one struct; whatever is wrong with it becomes one GeometryError.

Knows TOML and msgspec, and nothing of models: neither library's errors leave this module.
"""

import re
import tomllib
import typing
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from jitspark.errors import GeometryError

Struct = TypeVar("Struct", bound=msgspec.Struct)


def read(path: Path, shown: str) -> dict[str, Any]:
    """The file as plain values; `shown` is what errors call it."""
    # only regular files: opening a FIFO or a device could block or never end
    found, remedy = "no such file", "Correct the path."
    try:
        if path.is_file():
            return tomllib.loads(path.read_text(encoding="utf-8"))
        if path.exists():
            found = "something that is no file"
    except OSError as error:
        found, remedy = f"an unreadable file ({error.strerror})", "Make the file readable."
    except (ValueError, RecursionError) as error:  # bad TOML, bad UTF-8, absurd numbers or nesting
        found, remedy = f"text that is not TOML ({error})", "Mend the file; the built-in geometries are examples."
    raise GeometryError(where=shown, found=found, needed="a geometry in TOML", remedy=remedy)


def load(path: Path, shown: str, struct: type[Struct]) -> Struct:
    """The file as a `struct`, whose tag must be the file's `kind`. Raises GeometryError with the field's path."""
    data = read(path, shown)
    field, found, needed = _kind_problem(data, str(struct.__struct_config__.tag))
    if not field:
        try:
            return msgspec.convert(data, struct)
        except msgspec.ValidationError as error:
            field, found, needed = _explain(str(error), data, struct)
    raise GeometryError(
        where=f"{shown}: {field}",
        found=found,
        needed=needed,
        remedy=f"See the fields of {struct.__name__} in jitspark/geometry.py and the built-in geometries.",
    )


def _kind_problem(data: dict[str, Any], kind: str) -> tuple[str, str, str]:
    # checked here, because msgspec takes a missing tag for the right one
    found = f"the value {_short(data['kind'])}" if "kind" in data else "no such field"
    return ("", "", "") if data.get("kind") == kind else ("kind", found, repr(kind))


def _explain(message: str, data: dict[str, Any], struct: type[msgspec.Struct]) -> tuple[str, str, str]:
    """Field path, what was found and what was needed, from msgspec's one-line message."""
    text, _, place = message.partition(" - at `$")
    field = place.rstrip("`").lstrip(".")
    if named := re.fullmatch(r"Object (missing required|contains unknown) field `(.*)`", text):
        missing = named[1] == "missing required"
        found, needed = ("no such field", "a value") if missing else ("an unknown field", "only known fields")
        return f"{field}.{named[2]}".lstrip("."), found, needed
    if text.startswith("Invalid enum value"):
        needed = " or ".join(map(repr, _choices(field, struct)))
    else:
        needed = text.replace("`", "").removeprefix("Expected ").partition(", got")[0]
    return field, f"the value {_short(_value_at(field, data))}", needed


def _steps(field: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", field)


def _value_at(field: str, data: Any) -> Any:
    for step in _steps(field):
        data = data[int(step)] if isinstance(data, list) else data[step]
    return data


def _choices(field: str, struct: Any) -> tuple[Any, ...]:
    """The values that the Literal type of this field allows; an index steps into a tuple's items."""
    for step in _steps(field):
        struct = typing.get_args(struct)[0] if step.isdigit() else typing.get_type_hints(struct)[step]
    return typing.get_args(struct)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
