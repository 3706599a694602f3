"""Where two recipes differ, leaf by leaf, and which stored entry comes nearest to one."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitspark.cache.store import Entry

ABSENT = "(absent)"
# What is chosen, and where the spec's part of a recipe says it again.
_CHOSEN = ("axes.", "dtypes.", "statics.")
_REPEATED = "spec.factory_arguments."


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of a recipe that is not what was wanted."""

    field: str
    stored: Any
    wanted: Any

    def __str__(self) -> str:
        return f"{self.field}: stored {shown(self.stored)}, wanted {shown(self.wanted)}"


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Difference]:
    """The leaves in which two recipes (plain JSON values) differ, sorted by field."""
    left, right = dict(leaves(stored)), dict(leaves(wanted))
    fields = sorted(left.keys() | right.keys())
    pairs = ((field, left.get(field, ABSENT), right.get(field, ABSENT)) for field in fields)
    # by type too: 1, 1.0 and True are equal in Python but compile to different kernels
    found = [Difference(*each) for each in pairs if (type(each[1]), each[1]) != (type(each[2]), each[2])]
    said = {each.field.rpartition(".")[2] for each in found if each.field.startswith(_CHOSEN)}
    return [each for each in found if not each.field.startswith(_REPEATED) or each.field.rpartition(".")[2] not in said]


def nearest(wanted: Mapping[str, Any], entries: Sequence[Entry]) -> tuple[Entry, list[Difference]] | None:
    """The entry whose recipe differs from `wanted` in the fewest leaves, and those; None without entries."""
    found = [(entry, differences(entry.record.recipe, wanted)) for entry in entries]
    return min(found, key=lambda each: (len(each[1]), each[0].key, each[0].toolchain), default=None)


def leaves(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    """(field path, value) of every leaf. Items of a list that have a name go by it, others by their place."""
    if isinstance(value, Mapping) and set(value) == {"float"}:
        yield field, _number(value["float"])
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from leaves(item, f"{field}.{name}" if field else str(name))
    elif isinstance(value, (list, tuple)):
        names = [str(item["name"]) if isinstance(item, Mapping) and "name" in item else "" for item in value]
        unique = all(names) and len(set(names)) == len(names)
        for index, item in enumerate(value):
            yield from leaves(item, f"{field}.{names[index]}" if unique else f"{field}[{index}]")
    else:
        yield field, value


def shown(value: Any) -> str:
    """A value for people: digests shortened, control characters of hostile records escaped."""
    text = value if value is ABSENT else repr(value)
    if isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdef" for c in value):
        return value[:12]
    return text if len(text) <= 200 else f"{text[:197]}..."


def _number(text: Any) -> Any:
    try:
        return float.fromhex(text)
    except (TypeError, ValueError, OverflowError):
        return text
