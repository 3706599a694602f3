"""`explain KERNEL`: for each specialization, whether the cache has it, and if not, how the nearest entry differs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cache_tools.difference import Difference, nearest
from cache_tools.entries import compiler_version, entries_in, entries_of
from jitspark.building.progress import Wanted
from jitspark.cache.store import Entry, Layer
from jitspark.key import plain

SHOWN = 12


@dataclass(frozen=True, slots=True)
class Explanation:
    """A wanted key: the entries that have it, or the entry that comes nearest and where that differs."""

    wanted: Wanted
    entries: tuple[Entry, ...]
    nearest: Entry | None = None
    differences: tuple[Difference, ...] = ()


def explain(wanted: Sequence[Wanted], layers: Sequence[Layer]) -> list[Explanation]:
    """One explanation for each wanted key, in order. Reads records only and writes nothing."""
    stored: dict[str, list[Entry]] = {}
    for entry in entries_in(layers, kernels={item.key.kernel for item in wanted}):
        stored.setdefault(entry.key.kernel, []).append(entry)
    return [_explain(item, tuple(entries_of(item.key, layers)), stored.get(item.key.kernel, [])) for item in wanted]


def _explain(item: Wanted, entries: tuple[Entry, ...], stored: Sequence[Entry]) -> Explanation:
    found = None if entries else nearest(plain(item.recipe), stored)
    return Explanation(item, entries) if found is None else Explanation(item, entries, found[0], tuple(found[1]))


def explanation_lines(explanations: Sequence[Explanation]) -> Iterator[str]:
    """The text for people."""
    for each in explanations:
        yield f"{'hit ' if each.entries else 'miss'}  {each.wanted.key}  {each.wanted.specialization.title()}"
        for entry in each.entries:
            yield f"      {entry.where} (compiler {compiler_version(entry.record)})"
        yield from _miss_lines(each)
    hits = sum(bool(each.entries) for each in explanations)
    yield f"{len(explanations)} keys: {hits} hits, {len(explanations) - hits} misses"


def _miss_lines(each: Explanation) -> Iterator[str]:
    if each.entries:
        return
    if each.nearest is None:
        yield f"      no entry of {each.wanted.key.kernel} in the cache"
        return
    yield f"      nearest: {each.nearest.key}, {len(each.differences)} differences"
    for difference in each.differences[:SHOWN]:
        yield f"        {difference}"
    if len(each.differences) > SHOWN:
        yield f"        ... {len(each.differences) - SHOWN} more (--json has all)"


def explanation_json(explanations: Sequence[Explanation]) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [
        {
            "key": str(each.wanted.key),
            "recipe_digest": each.wanted.key.recipe,
            "target": each.wanted.key.target,
            "what": each.wanted.specialization.title(),
            "hit": bool(each.entries),
            "entries": [entry.where for entry in each.entries],
            "nearest": None if each.nearest is None else each.nearest.where,
            "differences": [{"field": d.field, "stored": d.stored, "wanted": d.wanted} for d in each.differences],
        }
        for each in explanations
    ]
