"""Which entry serves a key: memory, then this process' own toolchain, then any that it can run, layer by layer.

The order is total and the same in every process, so ranks that see the same roots load the same bytes. A bad entry is
a miss: set aside where that is possible, passed over elsewhere, said once. A root is checked once, before first use.
"""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from jitspark.errors import EntryError
from jitspark.key import Key, toolchain_digest
from jitspark.loader import check_usable
from jitspark.runtime_library import find_runtime_library, load_runtime_library
from jitspark.settings import Settings
from jitspark.store import Entry, Layer, entry_directory, quarantine, read_entry, root_problem, toolchains_of
from jitspark.toolchain import Toolchain, own_toolchain

logger = logging.getLogger("jitspark")


@dataclass(frozen=True, slots=True)
class Roots:
    """The layers that passed their checks, read-only ones first, and the writable root if there is one."""

    layers: tuple[Layer, ...]
    writable: Path | None


def open_roots(settings: Settings) -> Roots:
    """Check the roots that the settings name and make the writable one. A root that fails is left out, said once."""
    layers = tuple(Layer(root, writable=False) for root in settings.cache_path if _fit(root, settings))
    writable = settings.cache_dir
    if writable is None or not _make(writable) or not _fit(writable, settings):
        logger.warning("No writable cache directory: what is compiled here stays in this process' memory.")
        return Roots(layers, None)
    return Roots((*layers, Layer(writable, writable=True)), writable)


def _make(root: Path) -> bool:
    try:
        os.makedirs(root, mode=0o755, exist_ok=True)
    except OSError as problem:
        logger.warning("Cache directory %s cannot be made: %s.", root, problem.strerror)
        return False
    if not os.access(root, os.W_OK | os.X_OK):
        logger.warning("Cache directory %s cannot be written to.", root)
        return False
    return True


def _fit(root: Path, settings: Settings) -> bool:
    problem = root_problem(root, settings.trust_writable_roots)
    if problem is not None:
        logger.warning(
            "Cache root %s is not used: %s. A root belongs to this user or root and no other may write to it "
            "(JITSPARK_TRUST_WRITABLE_ROOTS=1 accepts it all the same).",
            root,
            problem,
        )
    return problem is None


class Lookup:
    """Finds entries. Holds what was built without a writable root, and which entries were found bad."""

    def __init__(self, settings: Settings, roots: Roots | None = None, toolchain: Toolchain | None = None) -> None:
        self._settings = settings
        self.roots = roots or open_roots(settings)
        self.toolchain = toolchain or own_toolchain()
        self.own = None if self.toolchain is None else toolchain_digest(self.toolchain)
        self._memory: dict[Key, Entry] = {}
        self._bad: set[str] = set()

    def remember(self, entry: Entry) -> None:
        """Keep an entry in memory, for a process that could not publish it."""
        self._memory[entry.key] = entry

    def find(self, key: Key) -> Entry | None:
        """The entry that serves `key`, its record checked, or None. Takes no lock; writes only to set a bad entry aside."""
        if key in self._memory:
            return self._memory[key]
        if self.own is not None and (entry := self._first(key, self.own)) is not None:
            return entry
        if self._settings.toolchain == "own":
            return None
        others = {name for layer in self.roots.layers for name in toolchains_of(layer, key)} - {self.own}
        found = (self._first(key, name) for name in sorted(others))
        return next((entry for entry in found if entry is not None and self._runs_here(entry)), None)

    def reject(self, entry: Entry, problem: EntryError) -> None:
        """Treat `entry` as bad from now on: its bytes turned out not to be what its record says."""
        if entry.layer is None:
            self._memory.pop(entry.key, None)
        else:
            self._set_aside(entry.layer, entry.key, entry.toolchain, problem)

    def _first(self, key: Key, toolchain: str) -> Entry | None:
        for layer in self.roots.layers:
            try:
                entry = read_entry(layer, key, toolchain)
            except EntryError as problem:
                self._set_aside(layer, key, toolchain, problem)
                continue
            if entry is not None and entry.where not in self._bad:
                return entry
        return None

    def _set_aside(self, layer: Layer, key: Key, toolchain: str, problem: EntryError) -> None:
        path = entry_directory(layer.root, key, toolchain)
        moved = layer.writable and quarantine(path, layer.root)
        if str(path) not in self._bad:
            fate = "moved to quarantine" if moved else "passed over"
            logger.warning("Bad cache entry %s (%s): %s.", path, fate, problem.found)
        if not moved:
            self._bad.add(str(path))

    def _runs_here(self, entry: Entry) -> bool:
        load_runtime_library(find_runtime_library(self._settings))
        try:
            check_usable(entry)
        except EntryError as problem:
            logger.info("Entry %s of another toolchain does not serve here: %s.", entry.key, problem.found)
            return False
        return True
