"""`diff A B`: which entries and plans two caches or packs do not share, and how an entry differs from the nearest."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cache_tools.difference import Difference, nearest, shown
from cache_tools.sources import Source
from jitspark.cache.store import Entry
from jitspark.key import Key

_SHOWN = 6

Place = tuple[Key, str]


@dataclass(frozen=True, slots=True)
class Only:
    """An entry that one side has, and where it differs from the other side's nearest of the same kernel."""

    side: str
    key: Key
    toolchain: str
    differences: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class CacheDifference:
    """`changed` holds entries of one key and toolchain whose bytes differ; `same` counts those that do not.

    `plans` holds (side, name) of plans that one side has, and ("both", name) of those whose bytes differ.
    """

    only: tuple[Only, ...]
    changed: tuple[Place, ...]
    same: int
    plans: tuple[tuple[str, str], ...] = ()

    @property
    def equal(self) -> bool:
        return not self.only and not self.changed and not self.plans


def cache_difference(first: Source, second: Source) -> CacheDifference:
    """What the two do not share, sorted."""
    a, b = _places(first.entries), _places(second.entries)
    shared = sorted(a.keys() & b.keys())
    changed = tuple(place for place in shared if a[place].record != b[place].record)
    only = [*_only("A", a, b), *_only("B", b, a)]
    return CacheDifference(tuple(only), changed, len(shared) - len(changed), tuple(_plans(first, second)))


def _plans(first: Source, second: Source) -> Iterator[tuple[str, str]]:
    a, b = ({each.name: each.content for each in source.plans} for source in (first, second))
    yield from (("A", name) for name in sorted(a.keys() - b.keys()))
    yield from (("B", name) for name in sorted(b.keys() - a.keys()))
    yield from (("both", name) for name in sorted(a.keys() & b.keys()) if a[name] != b[name])


def _places(entries: Sequence[Entry]) -> dict[Place, Entry]:
    return {(entry.key, entry.toolchain): entry for entry in entries}


def _only(side: str, here: dict[Place, Entry], there: dict[Place, Entry]) -> Iterator[Only]:
    for key, toolchain in sorted(here.keys() - there.keys()):
        yield Only(side, key, toolchain, _against(here[key, toolchain], list(there.values())))


def _against(entry: Entry, others: Sequence[Entry]) -> tuple[Difference, ...]:
    if any(other.key == entry.key for other in others):
        return (Difference("toolchain", "another", entry.toolchain),)
    alike = [other for other in others if other.key.kernel == entry.key.kernel]
    found = nearest(entry.record.recipe, alike)
    return () if found is None else tuple(found[1])


def difference_lines(result: CacheDifference, first: str, second: str) -> Iterator[str]:
    """The result for people."""
    names = {"A": first, "B": second}
    for each in result.only:
        yield f"only in {names[each.side]}: {each.key}, toolchain {each.toolchain[:12]}"
        fields = each.differences[:_SHOWN]
        yield from (f"    {field.field}: {shown(field.wanted)}, there {shown(field.stored)}" for field in fields)
    yield from (f"other bytes: {key}, toolchain {toolchain[:12]}" for key, toolchain in result.changed)
    for side, name in result.plans:
        yield f"only in {names[side]}: plan {name[:12]}" if side in names else f"other bytes: plan {name[:12]}"
    yield f"{result.same} entries the same, {len(result.changed)} with other bytes, {len(result.only)} on one side only"


def difference_json(result: CacheDifference) -> dict[str, Any]:
    """The result as one JSON object."""
    only = [
        {
            "side": each.side,
            "key": each.key.path,
            "toolchain": each.toolchain,
            "differences": [{"field": d.field, "here": d.wanted, "there": d.stored} for d in each.differences],
        }
        for each in result.only
    ]
    changed = [f"{key.path}/{toolchain}" for key, toolchain in result.changed]
    plans = [{"side": side, "name": name} for side, name in result.plans]
    return {"only": only, "changed": changed, "plans": plans, "same": result.same, "equal": result.equal}
