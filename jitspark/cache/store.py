"""The store: layers of roots that hold immutable entries. Lookups take no lock and write nothing.

    <root>/artifacts-v1/<target>-<host>/<kernel>/<recipe>/<toolchain>/{kernel.so, record.json}
    <root>/plans-v1/<digest>.json                          read and written by `plans.store`
    <root>/runtime-v1/  packs-v1/                          see ARCHITECTURE.md
    writable root only: staging/<owner>/  quarantine/<random>/  failures/<digest>.json  ledger/

An entry appears by one rename of a complete, flushed directory, so whoever sees its record sees all of it. What
lies in an entry is never trusted: bytes are checked against the record each time they are read.
"""

import contextlib
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jitspark.cache.folders import (
    FILE_MODE,
    FOLDER_MODE,
    cannot_write,
    in_folder,
    make_folder,
    open_folder,
    place,
    read_file,
    sync,
)
from jitspark.cache.record import (
    MAX_ARTIFACT_BYTES,
    MAX_RECORD_BYTES,
    Record,
    check_artifact,
    check_library,
    record_from_bytes,
)
from jitspark.cache.staging import QUARANTINE, fresh_name, staging
from jitspark.errors import CacheDirectoryError, EntryError
from jitspark.key import Key

ARTIFACTS = "artifacts-v1"
PLANS = "plans-v1"
ARTIFACT = "kernel.so"
RECORD = "record.json"

_PLACE_TRIES = 3


@dataclass(frozen=True, slots=True)
class Layer:
    """One root. Only the writable one is ever written to; `trusted` accepts what others may change."""

    root: Path
    writable: bool
    trusted: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry whose record has been checked. `content` holds the artifact when the entry lives in memory only."""

    layer: Layer | None
    key: Key
    toolchain: str
    record: Record
    content: bytes | None = None

    @property
    def directory(self) -> Path | None:
        return None if self.layer is None else entry_directory(self.layer.root, self.key, self.toolchain)

    @property
    def where(self) -> str:
        return "memory" if self.layer is None else str(self.directory)

    def read_artifact(self) -> bytes:
        """The artifact's bytes, checked against the record.

        Raises EntryError when they are gone, differ, or (with the OSError as its cause) cannot be read.
        """
        if self.content is not None:
            return self.content
        layer, parts = self.layer, entry_parts(self.key, self.toolchain)
        assert layer is not None
        try:
            return in_folder(
                layer.root, parts, lambda folder: _artifact(layer, folder, parts, self.record), trusted=layer.trusted
            )
        except FileNotFoundError as problem:
            raise EntryError(
                where=self.where, found=f"no {ARTIFACT}", needed="a whole entry", remedy="It was removed; it is a miss."
            ) from problem


def _artifact(layer: Layer, folder: int, parts: tuple[str, ...], record: Record) -> bytes:
    where = place(layer.root, parts)
    content = read_file(folder, ARTIFACT, MAX_ARTIFACT_BYTES, where, trusted=layer.trusted)
    check_artifact(record, content, where)
    check_library(content, where)
    return content


def entry_parts(key: Key, toolchain: str) -> tuple[str, ...]:
    return (ARTIFACTS, *key.path.split("/"), toolchain)


def entry_directory(root: Path, key: Key, toolchain: str) -> Path:
    return root.joinpath(*entry_parts(key, toolchain))


def read_entry(layer: Layer, key: Key, toolchain: str, *, whole: bool = False) -> Entry | None:
    """The entry of `key` by `toolchain` in `layer`, None when there is none. `whole`: its artifact is checked as well.

    Raises EntryError when it is no good, or (with the OSError as its cause) cannot be read.
    """
    record = _read_record(layer, entry_parts(key, toolchain), key, toolchain, whole=whole)
    return None if record is None else Entry(layer, key, toolchain, record)


def _read_record(layer: Layer, parts: tuple[str, ...], key: Key, toolchain: str, *, whole: bool) -> Record | None:
    def read(folder: int) -> Record:
        where = place(layer.root, (*parts, RECORD))
        content = read_file(folder, RECORD, MAX_RECORD_BYTES, where, trusted=layer.trusted)
        record = record_from_bytes(content, where, key, toolchain)
        if whole:
            _artifact(layer, folder, parts, record)
        return record

    try:
        return in_folder(layer.root, parts, read, trusted=layer.trusted)
    except FileNotFoundError:
        return None


def _whole(layer: Layer, parts: tuple[str, ...], key: Key, toolchain: str) -> Record | None:
    """The record of the entry at `parts` if all of it is good."""
    try:
        return _read_record(layer, parts, key, toolchain, whole=True)
    except EntryError:
        return None


def may_hold(layer: Layer, key: Key) -> bool:
    """Whether there is anything to read under `key`; costs one system call, so that polling for an entry is cheap."""
    try:
        os.stat(f"{layer.root}/{ARTIFACTS}/{key.path}")
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def toolchains_of(layer: Layer, key: Key) -> list[str]:
    """Digests of the toolchains that have an entry for `key` in `layer`, in the order that all processes share."""
    with contextlib.suppress(OSError):
        names = os.listdir(f"{layer.root}/{ARTIFACTS}/{key.path}")
        return sorted(name for name in names if len(name) == 64 and not name.strip("0123456789abcdef"))
    return []


def targets_of(layer: Layer, kernel: str) -> set[str]:
    """The `<target>-<host>` folders of `layer` that hold entries of `kernel`."""
    return {name for name in _names(layer.root / ARTIFACTS) if _names(layer.root / ARTIFACTS / name / kernel)}


def keys_in(layer: Layer) -> Iterator[tuple[Key, str]]:
    """Every (key, toolchain digest) that has a directory in `layer`, sorted. Names that are no keys are passed over."""
    top = layer.root / ARTIFACTS
    for target_host in _names(top):
        target, _, host = target_host.partition("-")
        for kernel in _names(top / target_host):
            for recipe in _names(top / target_host / kernel):
                with contextlib.suppress(ValueError):
                    key = Key(target, host, kernel, recipe)
                    yield from ((key, toolchain) for toolchain in toolchains_of(layer, key))


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def put(layer: Layer, key: Key, record: Record, content: bytes) -> Entry:
    """Make `content` the artifact of `key` in the writable `layer`. Returns and raises what `publish` does."""
    for last in (False, True):
        try:
            with staging(layer.root, trusted=layer.trusted) as folder:
                _write(layer.root, folder / ARTIFACT, content)
                return publish(layer.root, key, record, folder, trusted=layer.trusted)
        except CacheDirectoryError as problem:
            # Somebody's cleaning took our staging folder for an orphan: once more.
            if last or not isinstance(problem.__cause__, FileNotFoundError):
                raise
    raise AssertionError("the last try returns or raises")


def _write(root: Path, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as problem:
        raise cannot_write(root, problem) from problem


def publish(root: Path, key: Key, record: Record, staged: Path, *, trusted: bool = False) -> Entry:
    """Make `staged` (which holds kernel.so) the entry of `key`, record last, by one rename.

    Losing the race to another builder is success: theirs stands, and it is what is returned.
    Raises CacheDirectoryError when the root cannot be written to; nothing is half-written then.
    """
    layer = Layer(root, writable=True, trusted=trusted)
    try:
        sync(staged / ARTIFACT, FILE_MODE)
        (staged / RECORD).write_bytes(record.to_bytes())
        sync(staged / RECORD, FILE_MODE)
        sync(staged, FOLDER_MODE)
        return _place(layer, key, record, staged)
    except EntryError as problem:
        raise cannot_write(root, OSError(f"{problem.where}: {problem.found}")) from problem
    except OSError as problem:
        raise cannot_write(root, problem) from problem


def _place(layer: Layer, key: Key, record: Record, staged: Path) -> Entry:
    """Rename `staged` to where it belongs, unless a good entry stands there; a bad one is set aside."""
    toolchain = record.toolchain_digest
    parts = entry_parts(key, toolchain)
    for _ in range(_PLACE_TRIES):
        parent = make_folder(layer.root, parts[:-1], trusted=layer.trusted)
        try:
            os.rename(staged, parts[-1], dst_dir_fd=parent)
            os.fsync(parent)
            return Entry(layer, key, toolchain, record)
        except OSError as problem:
            if problem.errno == errno.ENOENT and staged.exists():
                continue  # cleaning removed the empty parent between our look and our rename
            if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
        finally:
            os.close(parent)
        theirs = _whole(layer, parts, key, toolchain)
        if theirs is not None:
            return Entry(layer, key, toolchain, theirs)
        set_aside(layer, key, toolchain)
    raise OSError(errno.EEXIST, "a bad entry in the way that cannot be moved")


def set_aside(layer: Layer, key: Key, toolchain: str) -> Literal["moved", "gone", "stuck"]:
    """Move a bad entry into its root's quarantine; "stuck" when that cannot be done."""
    parts, aside = entry_parts(key, toolchain), (QUARANTINE, fresh_name())
    with contextlib.ExitStack() as stack:
        try:
            source = open_folder(layer.root, parts[:-1], trusted=layer.trusted)
            stack.callback(os.close, source)
            target = make_folder(layer.root, aside[:-1], trusted=layer.trusted)
            stack.callback(os.close, target)
            os.rename(parts[-1], aside[-1], src_dir_fd=source, dst_dir_fd=target)
        except FileNotFoundError:
            return "gone"
        except (OSError, EntryError):
            return "stuck"
        # Another process may have set the bad one aside and published a good one since we looked.
        if _whole(layer, aside, key, toolchain) is not None:
            with contextlib.suppress(OSError):
                os.rename(aside[-1], parts[-1], src_dir_fd=target, dst_dir_fd=source)
                return "gone"
    return "moved"
