"""`prune`: remove entries by size, age and toolchain, plans by age, and what killed processes left behind.

An entry is renamed away and then unlinked: a lookup at that moment misses, and what is loaded lives in memory. What a
stored plan pins stays, and so does what somebody holds the lock of, to build it. A plan is as old as the last `warm`
that wanted it; an old one goes first, and pins no more.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_tools.pins import pinned_keys, plan_names
from jitspark.cache.failures import sweep_failures
from jitspark.cache.folders import make_folder, open_folder
from jitspark.cache.lock import LockDirectory, keys_folder
from jitspark.cache.runtime_library import RUNTIME
from jitspark.cache.staging import STAGING, owned_name, remove, sweep
from jitspark.cache.store import ARTIFACTS, PLANS, Layer, entry_directory, entry_parts, keys_in
from jitspark.errors import CacheDirectoryError, EntryError, ToolchainError
from jitspark.key import Key, toolchain_digest
from jitspark.settings import Settings
from jitspark.toolchain import own_toolchain

_LAYOUT = re.compile(r"(artifacts|plans|runtime)-v([0-9]{1,9})\Z")


@dataclass(frozen=True, slots=True)
class Rules:
    """What to remove. `max_size` in bytes, `unused_for` in seconds; None and False remove nothing."""

    max_size: int | None = None
    unused_for: float | None = None
    other_toolchains: bool = False
    old_layouts: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Removed:
    """Something that is gone, or would be in a dry run."""

    path: Path
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` came to. `pinned` and `busy` count entries that a rule named and that stayed all the same."""

    removed: tuple[Removed, ...]
    kept: int
    kept_size: int
    pinned: int
    busy: int
    dry_run: bool

    @property
    def freed(self) -> int:
        return sum(each.size for each in self.removed)


@dataclass(frozen=True, slots=True)
class _Candidate:
    key: Key
    toolchain: str
    size: int
    last_use: float


def prune(layer: Layer, rules: Rules, settings: Settings, others: Sequence[Layer] = ()) -> Pruned:
    """Apply `rules` to the writable `layer`; plans in it and in `others` pin their keys.

    Raises ToolchainError when other toolchains are to go and this process has none of its own.
    """
    entries = _candidates(layer)
    plans = _old_plans(layer, rules)
    free, pinned = _chosen(entries, rules, pinned_keys((layer, *others), but={each.path for each in plans}))
    removed, gone, busy = plans + _leftovers(layer, rules), set(), 0
    lock = _locks(layer, settings)
    for entry, why in free:
        with lock(entry.key) as taken:
            if taken and (rules.dry_run or _remove_entry(layer, entry)):
                removed.append(Removed(entry_directory(layer.root, entry.key, entry.toolchain), entry.size, why))
                gone.add(entry)
            busy += not taken
    if gone and not rules.dry_run:
        _forget(layer, gone)
    kept = [entry for entry in entries if entry not in gone]
    return Pruned(tuple(removed), len(kept), sum(e.size for e in kept), pinned, busy, dry_run=rules.dry_run)


def _candidates(layer: Layer) -> list[_Candidate]:
    used = _last_uses(layer)
    found = []
    for key, toolchain in keys_in(layer):
        folder = entry_directory(layer.root, key, toolchain)
        with contextlib.suppress(OSError):
            made = folder.lstat().st_mtime
            last_use = max(made, used.get(f"{key.path}/{toolchain}", 0))
            found.append(_Candidate(key, toolchain, _size(folder), last_use))
    return found


def _old_plans(layer: Layer, rules: Rules) -> list[Removed]:
    """Plans that no warm has wanted for as long as the rule says; they are removed."""
    old: list[Removed] = []
    for name in plan_names(layer.root) if rules.unused_for is not None else ():
        path = layer.root / PLANS / name
        with contextlib.suppress(OSError):
            state = path.lstat()
            if state.st_mtime < time.time() - (rules.unused_for or 0):
                if not rules.dry_run:
                    path.unlink()
                old.append(Removed(path, state.st_size, "unused"))
    return old


def _last_uses(layer: Layer) -> dict[str, int]:
    from jitspark.cache.ledger import lines

    return {line.entry: line.last_use for line in lines(layer) if line.layer == str(layer.root)}


def _chosen(
    entries: Sequence[_Candidate], rules: Rules, pins: Container[Key]
) -> tuple[list[tuple[_Candidate, str]], int]:
    """What the rules name, with the rule, least recently used first; and how many more they name that are pinned."""
    reason = _reason(rules)
    left, pinned = sum(entry.size for entry in entries), 0
    chosen: list[tuple[_Candidate, str]] = []
    spared = []
    for entry in sorted(entries, key=lambda e: (e.last_use, e.key, e.toolchain)):
        why = reason(entry)
        if why is None:
            spared.append(entry)
        elif entry.key in pins:
            pinned += 1
        else:
            chosen.append((entry, why))
            left -= entry.size
    for entry in spared if rules.max_size is not None else ():
        if left <= (rules.max_size or 0):
            break
        if entry.key in pins:  # its bytes stay, so that others have to go
            pinned += 1
        else:
            chosen.append((entry, "over the size limit"))
            left -= entry.size
    return chosen, pinned


def _reason(rules: Rules) -> Callable[[_Candidate], str | None]:
    own = _own_toolchain() if rules.other_toolchains else None
    oldest = time.time() - rules.unused_for if rules.unused_for is not None else None

    def reason(entry: _Candidate) -> str | None:
        if own is not None and entry.toolchain != own:
            return "another toolchain's"
        return "unused" if oldest is not None and entry.last_use < oldest else None

    return reason


def _own_toolchain() -> str:
    own = own_toolchain()
    if own is None:
        raise ToolchainError(
            where="--other-toolchains",
            found="no toolchain in this environment",
            needed="one, to know which entries are others'",
            remedy="Run this where jitspark[compile] is installed, or prune by size or age.",
        )
    return toolchain_digest(own)


def _locks(layer: Layer, settings: Settings) -> Callable[[Key], contextlib.AbstractContextManager[bool]]:
    """Whether nobody builds a key, kept so meanwhile. Where locks do not work, nobody is known to."""
    try:
        locks = LockDirectory(settings.lock_dir, keys_folder(settings.lock_dir, layer.root), settings.compile_slots)
    except CacheDirectoryError:
        return lambda _: contextlib.nullcontext(enter_result=True)

    @contextlib.contextmanager
    def lock(key: Key) -> Iterator[bool]:
        held = locks.key(key.recipe)
        taken = held.try_acquire("pruning")
        try:
            yield taken
        finally:
            if taken:
                held.release()

    return lock


def _remove_entry(layer: Layer, entry: _Candidate) -> bool:
    """Rename the entry into staging, where an orphan is swept, and unlink it there."""
    parts, away = entry_parts(entry.key, entry.toolchain), owned_name()
    with contextlib.ExitStack() as stack:
        try:
            source = open_folder(layer.root, parts[:-1], trusted=layer.trusted)
            stack.callback(os.close, source)
            target = make_folder(layer.root, (STAGING,), trusted=layer.trusted)
            stack.callback(os.close, target)
            os.rename(parts[-1], away, src_dir_fd=source, dst_dir_fd=target)
        except (OSError, EntryError):
            return False
    remove(layer.root / STAGING / away)
    for depth in (4, 3, 2):  # a folder that is not empty stays
        with contextlib.suppress(OSError):
            layer.root.joinpath(*parts[:depth]).rmdir()
    return True


def _leftovers(layer: Layer, rules: Rules) -> list[Removed]:
    """Orphans, the old quarantine and expired failures always; folders of other layouts by their rule."""
    removed = [Removed(path, 0, "left behind") for path in sweep(layer.root, dry_run=rules.dry_run)]
    removed += [Removed(path, 0, "expired") for path in sweep_failures(layer.root, dry_run=rules.dry_run)]
    for name in sorted(os.listdir(layer.root)) if rules.old_layouts else ():
        if _is_old(name):
            path = layer.root / name
            removed.append(Removed(path, _size(path), "another layout's"))
            if not rules.dry_run:
                _remove_layout(layer, path)
    return removed


def _is_old(name: str) -> bool:
    """Whether `name` is a layout's folder before today's. A later one is a newer version's, at work on this root."""
    layout = _LAYOUT.match(name)
    today = next((each for each in (ARTIFACTS, PLANS, RUNTIME) if layout and each.startswith(f"{layout[1]}-v")), None)
    return layout is not None and today is not None and int(layout[2]) < int(today.rpartition("v")[2])


def _remove_layout(layer: Layer, path: Path) -> None:
    away = layer.root / STAGING / owned_name()
    with contextlib.suppress(OSError, EntryError):
        os.close(make_folder(layer.root, (STAGING,), trusted=layer.trusted))
        path.rename(away)
        remove(away)


def _size(path: Path) -> int:
    """Bytes in the files of a folder."""
    size = 0
    for folder, _, files in os.walk(path):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def _forget(layer: Layer, gone: set[_Candidate]) -> None:
    from jitspark.cache.ledger import forget

    forget(layer, [f"{entry.key.path}/{entry.toolchain}" for entry in gone])


def pruned_lines(result: Pruned) -> Iterator[str]:
    """The result for people."""
    verb = "would remove" if result.dry_run else "removed"
    yield from (f"{verb} {each.path}: {each.why}" for each in result.removed)
    notes = ((result.pinned, "pinned by plans"), (result.busy, "being built"))
    stayed = "".join(f", {count} {why}" for count, why in notes if count)
    counts = f"{verb} {len(result.removed)}, {result.freed} bytes"
    yield f"{counts}; {result.kept} entries, {result.kept_size} bytes stay{stayed}"


def pruned_json(result: Pruned) -> dict[str, Any]:
    """The result as one JSON object."""
    removed = [{"path": str(each.path), "bytes": each.size, "why": each.why} for each in result.removed]
    counts = {"kept": result.kept, "kept_bytes": result.kept_size, "pinned": result.pinned, "busy": result.busy}
    return {"removed": removed, "freed_bytes": result.freed, **counts, "dry_run": result.dry_run}
