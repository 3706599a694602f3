"""`verify`: every entry and every plan of every layer read and hashed again."""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cache_tools.pins import plan_names
from cache_tools.plan_files import PlanFiles
from jitspark.cache.store import Layer, entry_directory, keys_in, read_entry
from jitspark.errors import EntryError, PlanError
from jitspark.key import Key


@dataclass(frozen=True, slots=True)
class Bad:
    """An entry that would be a miss, and why."""

    where: str
    found: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What `verify` came to; `size` counts the artifacts' bytes that were hashed and found good."""

    entries: int
    plans: int
    size: int
    bad: tuple[Bad, ...]


def verify(layers: Sequence[Layer]) -> Verified:
    """Re-hash every entry, and read every plan. Changes nothing: a lookup sets bad entries aside when it meets them."""
    bad: list[Bad] = []
    entries = plans = size = 0
    for layer in layers:
        for key, toolchain in keys_in(layer):
            try:
                size += _good_bytes(layer, key, toolchain)
            except EntryError as problem:
                if not os.path.lexists(entry_directory(layer.root, key, toolchain)):
                    continue  # cleaned up while we looked
                bad.append(Bad(problem.where, problem.found))
            entries += 1
        for found in _plans(layer):
            plans += 1
            bad += found
    return Verified(entries, plans, size, tuple(bad))


def _plans(layer: Layer) -> Iterator[list[Bad]]:
    """What is wrong with each plan: nothing or one thing."""
    files = PlanFiles()
    for name in plan_names(layer.root):
        try:
            files.stored(layer, name)
            yield []
        except FileNotFoundError:
            continue
        except (EntryError, PlanError) as problem:
            yield [Bad(problem.where, problem.found)]


def _good_bytes(layer: Layer, key: Key, toolchain: str) -> int:
    entry = read_entry(layer, key, toolchain)
    if entry is None:
        where = str(entry_directory(layer.root, key, toolchain))
        raise EntryError(where=where, found="no record", needed="a whole entry", remedy="Remove it.")
    return len(entry.read_artifact())


def verified_lines(result: Verified) -> Iterator[str]:
    """The result for people."""
    yield from (f"bad: {bad.where}: {bad.found}" for bad in result.bad)
    plans = f"{result.plans} plans, " if result.plans else ""
    yield f"{result.entries} entries, {plans}{len(result.bad)} bad, {result.size} bytes verified"
