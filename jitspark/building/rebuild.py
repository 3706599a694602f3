"""`verify --rebuild`: compile a sample of entries again, in a cache of its own, and compare the bytes."""

import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jitspark.building.build import build
from jitspark.building.compiler_child import COMMAND
from jitspark.building.progress import Wanted
from jitspark.cache.folders import FOLDER_MODE
from jitspark.cache.lookup import Lookup, Roots
from jitspark.cache.store import Entry, Layer
from jitspark.errors import JitsparkError, SpecError
from jitspark.key import Key, recipe_of, toolchain_digest
from jitspark.registry import load_spec
from jitspark.settings import Settings
from jitspark.spec import Specialization
from jitspark.target import host_name
from jitspark.toolchain import require_toolchain


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a sample came to: entries whose bytes came out the same, that differ, and that cannot be compared here.

    The last two with the reason. An entry of other sources or another toolchain says nothing about its builder.
    """

    same: tuple[Key, ...]
    different: tuple[tuple[Entry, str], ...]
    skipped: tuple[tuple[Entry, str], ...]


def sample(entries: Sequence[Entry], share: float) -> list[Entry]:
    """`share` (0 to 1) of the entries, at least one, spread evenly over the sorted keys: the same each time."""
    ordered = sorted({(entry.key, entry.toolchain): entry for entry in entries}.items())
    count = math.ceil(len(ordered) * share)
    return [ordered[index * len(ordered) // count][1] for index in range(count)]


def rebuild(entries: Sequence[Entry], settings: Settings, command: tuple[str, ...] = COMMAND) -> Rebuilt:
    """Compile each of `entries` again, from today's sources, and compare. Writes to no cache.

    Raises ToolchainError where there is no compiler.
    """
    own = toolchain_digest(require_toolchain())
    wanted: list[tuple[Entry, Wanted]] = []
    skipped: list[tuple[Entry, str]] = []
    for entry in entries:
        item = _wanted(entry, own)
        if isinstance(item, str):
            skipped.append((entry, item))
        else:
            wanted.append((entry, item))
    compared = list(_compared(wanted, settings, command)) if wanted else []
    same = tuple(entry.key for entry, problem in compared if problem is None)
    return Rebuilt(same, tuple((e, problem) for e, problem in compared if problem is not None), tuple(skipped))


def _wanted(entry: Entry, own: str) -> Wanted | str:
    """What to compile so that it must give the entry's bytes, or why that cannot be done here."""
    if entry.key.host != host_name():
        return f"built on another host ({entry.key.host})"
    if entry.toolchain != own:
        return "built by another toolchain"
    recipe = entry.record.recipe
    try:
        chosen = [_values(recipe[part]) for part in ("axes", "dtypes", "statics")]
        specialization = Specialization(load_spec(entry.key.kernel), *chosen)
        again = recipe_of(specialization, entry.key.target)
    except (JitsparkError, LookupError, TypeError, ValueError) as problem:
        return f"not in today's sources ({problem})"
    return Wanted(specialization, again) if again.key == entry.key else "its sources are not today's"


def _values(chosen: Any) -> dict[str, Any]:
    """A recipe's choices as Python values: floats stand in it by their exact value."""
    if not isinstance(chosen, dict):
        raise SpecError(where="recipe", found="no mapping", needed="choices by name", remedy="Rebuild the entry.")
    return {name: _value(value) for name, value in chosen.items()}


def _value(value: Any) -> Any:
    return float.fromhex(value["float"]) if isinstance(value, dict) and set(value) == {"float"} else value


def _compared(
    wanted: Sequence[tuple[Entry, Wanted]], settings: Settings, command: tuple[str, ...]
) -> Iterator[tuple[Entry, str | None]]:
    with tempfile.TemporaryDirectory(prefix="jitspark-rebuild-") as folder:
        root = Path(folder) / "root"
        root.mkdir()
        root.chmod(FOLDER_MODE)
        alone = replace(settings, cache_dir=root, cache_path=(), compile="auto", toolchain="own")
        lookup = Lookup(alone, Roots((Layer(root, writable=True),), root))
        report = build([item for _, item in wanted], lookup, alone, must_publish=True, command=command)
        for entry, item in wanted:
            error = report.failed.get(item.key)
            yield entry, str(error) if error else _difference(entry, report.entries[item.key])


def _difference(entry: Entry, again: Entry) -> str | None:
    if entry.record.sha256 == again.record.sha256:
        return None if entry.record == again.record else "the same bytes with another record"
    return f"sha256 {entry.record.sha256}, compiled again {again.record.sha256}"
