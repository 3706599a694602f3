"""Which entry serves a key: memory, then this process' own toolchain, then any that it can run, layer by layer.

The order is total and the same in every process, so ranks that see the same roots load the same bytes. A bad entry is
a miss: set aside where that is possible, passed over elsewhere, said once. A root is checked before its first use.
"""

import ctypes
import functools
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jitspark.cache.folders import make_root, root_problem
from jitspark.cache.loader import check_usable
from jitspark.cache.runtime_library import find_runtime_library, load_runtime_library, without_collecting
from jitspark.cache.store import (
    Entry,
    Layer,
    entry_directory,
    may_hold,
    read_entry,
    set_aside,
    targets_of,
    toolchains_of,
)
from jitspark.errors import EntryError
from jitspark.key import Key, toolchain_digest
from jitspark.notice import say_once
from jitspark.settings import Settings
from jitspark.toolchain import Toolchain, own_toolchain

logger = logging.getLogger("jitspark")


@dataclass(frozen=True, slots=True)
class Roots:
    """The layers that passed their checks, read-only ones first, and the writable root if there is one."""

    layers: tuple[Layer, ...]
    writable: Path | None

    @property
    def writable_layer(self) -> Layer | None:
        return next((layer for layer in self.layers if layer.writable), None)


def open_roots(settings: Settings) -> Roots:
    """Check the roots that the settings name and make the writable one. A root that fails is left out, said once."""
    trusted = settings.trust_writable_roots
    paths = [Path(os.path.abspath(root)) for root in settings.cache_path]
    layers = tuple(Layer(root, writable=False, trusted=trusted) for root in paths if _fit(root, settings))
    if settings.cache_dir is None:
        say_once("No writable cache directory: what is compiled here stays in this process' memory.")
        return Roots(layers, None)
    writable = Path(os.path.abspath(settings.cache_dir))
    problem = _unwritable(writable) or root_problem(writable, trusted)
    if problem is not None:
        say_once(f"Cache directory {writable} cannot be written to ({problem}): what is compiled here stays in memory.")
        readable = root_problem(writable, trusted) is None  # say, on a read-only file system
        return Roots((*layers, Layer(writable, writable=False, trusted=trusted)) if readable else layers, None)
    if writable == Path(f"/tmp/jitspark-{os.geteuid()}"):  # noqa: S108 - settings' last resort, checked above
        say_once(f"No home directory that can be written to: the cache lies in {writable}.")
    return Roots((*layers, Layer(writable, writable=True, trusted=trusted)), writable)


def _unwritable(root: Path) -> str | None:
    try:
        make_root(root)
    except OSError as problem:
        return problem.strerror or str(problem)
    return None if os.access(root, os.W_OK | os.X_OK) else "no permission to write"


def _fit(root: Path, settings: Settings) -> bool:
    problem = root_problem(root, settings.trust_writable_roots)
    if problem is not None:
        say_once(
            f"Cache root {root} is not used: {problem}. A root belongs to this user or root and no other may write to "
            "it (JITSPARK_TRUST_WRITABLE_ROOTS=1 accepts it all the same)."
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
        self._bad: set[tuple[Layer, Key, str]] = set()

    def remember(self, entry: Entry) -> None:
        """Keep an entry in memory, for a process that could not publish it."""
        self._memory[entry.key] = entry

    def find(self, key: Key, *, whole: bool = False) -> Entry | None:
        """The entry that serves `key`, its record checked (and, if `whole`, its artifact), or None.

        Takes no lock; a bad entry is set aside.
        """
        if key in self._memory:
            return self._memory[key]
        layers = [layer for layer in self.roots.layers if may_hold(layer, key)]
        if self.own is not None and (entry := self._first(layers, key, self.own, whole=whole)) is not None:
            return entry
        if not layers or self._settings.toolchain == "own":
            return None
        others = {name for layer in layers for name in toolchains_of(layer, key)} - {self.own}
        found = (self._first(layers, key, name, whole=whole) for name in sorted(others))
        return next((entry for entry in found if entry is not None and self._runs_here(entry)), None)

    def find_all(self, keys: Iterable[Key]) -> list[Entry | None]:
        """`find` for each key: what a plan asks for in one go."""
        with without_collecting():
            return [self.find(key) for key in keys]

    def reject(self, entry: Entry, problem: EntryError) -> None:
        """Treat `entry` as bad from now on: its bytes turned out not to be what its record says."""
        if entry.layer is None:
            self._memory.pop(entry.key, None)
        else:
            self._pass_over(entry.layer, entry.key, entry.toolchain, problem)

    def targets_held(self, kernel: str) -> list[str]:
        """The `<target>-<host>` pairs for which some layer has entries of `kernel`: what a refusal can name."""
        return sorted({name for layer in self.roots.layers for name in targets_of(layer, kernel)})

    def _first(self, layers: Iterable[Layer], key: Key, toolchain: str, *, whole: bool) -> Entry | None:
        for layer in layers:
            if (layer, key, toolchain) in self._bad:
                continue
            try:
                entry = read_entry(layer, key, toolchain, whole=whole)
            except EntryError as problem:
                self._pass_over(layer, key, toolchain, problem)
                continue
            if entry is not None:
                return entry
        return None

    def _pass_over(self, layer: Layer, key: Key, toolchain: str, problem: EntryError) -> None:
        """A miss from now on. An entry that the system could not read may well be good: it is never set aside."""
        if isinstance(problem.__cause__, FileNotFoundError):  # cleaned up while we looked
            return
        unread = isinstance(problem.__cause__, OSError)
        fate = set_aside(layer, key, toolchain) if layer.writable and not unread else "stuck"
        if fate == "gone":  # cleaned up, or replaced by a good one, since
            return
        what = "moved to quarantine" if fate == "moved" else "passed over"
        say_once(f"Bad cache entry {entry_directory(layer.root, key, toolchain)} ({what}): {problem.found}.")
        if fate == "stuck":
            self._bad.add((layer, key, toolchain))

    @functools.cached_property
    def _runtime(self) -> ctypes.CDLL:
        """Mapped once, before the first question whether an entry runs here."""
        return load_runtime_library(find_runtime_library(self._settings))

    def _runs_here(self, entry: Entry) -> bool:
        assert self._runtime is not None
        try:
            check_usable(entry)
        except EntryError as problem:
            logger.info("Entry %s of another toolchain does not serve here: %s.", entry.key, problem.found)
            return False
        return True
