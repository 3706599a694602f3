"""`ls`: which entries a cache holds, in total per kernel or one by one."""

from collections.abc import Iterator, Sequence
from typing import Any

from cache_tools.entries import compiler_version
from cache_tools.table import table
from jitspark.cache.store import Entry, Layer

Group = tuple[str, str, str, str, str]


def listing(entries: Sequence[Entry], layers: Sequence[Layer], *, one_by_one: bool) -> Iterator[str]:
    """The listing's lines for people."""
    if one_by_one:
        rows = [[str(e.key), e.toolchain[:12], e.record.size, str(_root(e))] for e in entries]
        yield from table(("entry", "toolchain", "bytes", "layer"), rows)
    else:
        header = ("kernel", "target", "host", "toolchain", "layer", "entries", "bytes")
        yield from table(header, [[*group, count, size] for group, (count, size) in sorted(_groups(entries).items())])
    roots = ", ".join(str(layer.root) for layer in layers) or "no cache root that exists"
    yield f"{len(entries)} entries, {sum(e.record.size for e in entries)} bytes in {roots}"


def listing_json(entries: Sequence[Entry], layers: Sequence[Layer]) -> dict[str, Any]:
    """The listing as one JSON object."""
    return {
        "roots": [{"root": str(layer.root), "writable": layer.writable} for layer in layers],
        "entries": [_entry_json(entry) for entry in entries],
        "bytes": sum(entry.record.size for entry in entries),
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "kernel": entry.key.kernel,
        "target": entry.key.target,
        "host": entry.key.host,
        "recipe": entry.key.recipe,
        "toolchain": entry.toolchain,
        "compiler": compiler_version(entry.record),
        "bytes": entry.record.size,
        "sha256": entry.record.sha256,
        "layer": str(_root(entry)),
    }


def _groups(entries: Sequence[Entry]) -> dict[Group, tuple[int, int]]:
    groups: dict[Group, tuple[int, int]] = {}
    for entry in entries:
        key = entry.key
        toolchain = f"{compiler_version(entry.record)}/{entry.toolchain[:12]}"
        group = (key.kernel, key.target, key.host, toolchain, str(_root(entry)))
        count, size = groups.get(group, (0, 0))
        groups[group] = (count + 1, size + entry.record.size)
    return groups


def _root(entry: Entry) -> object:
    return "memory" if entry.layer is None else entry.layer.root
