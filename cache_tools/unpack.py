"""`unpack`: the entries of a pack into a cache, each verified, all or none.

A pack is hostile until proven otherwise: nothing appears in the cache before every byte of it has been checked.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cache_tools.archive import RUNTIME_LIBRARY, RUNTIME_MEMBER, read_members
from jitspark.errors import EntryError, PackError
from jitspark.folders import FILE_MODE, cannot_write, make_folder, sync
from jitspark.key import Key
from jitspark.record import Record, check_artifact, record_from_bytes
from jitspark.staging import staging
from jitspark.store import ARTIFACT, RECORD, Layer, publish, read_entry


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What unpacking came to: entries that are new in the cache, and those that it had."""

    new: int
    kept: int


@dataclass(frozen=True, slots=True)
class _Staged:
    key: Key
    record: Record
    directory: Path


def unpack(file: Path, layer: Layer) -> Unpacked:
    """Put every entry of `file` into the cache `layer`, leaving good ones there as they are.

    Raises PackError for a pack that is damaged or holds anything but entries (the cache is untouched then),
    CacheDirectoryError when the root cannot be written to.
    """
    try:
        stream = file.open("rb")
    except OSError as problem:
        raise _bad(str(file), problem.strerror or str(problem), "a readable pack") from None
    root = layer.root
    with stream, staging(root, trusted=layer.trusted) as folder:
        staged, runtime = _stage(stream, file, root, folder)
        fresh = [each for each in staged if not _present(layer, each)]
        for each in fresh:
            publish(root, each.key, each.record, each.directory, trusted=layer.trusted)
        for path in runtime:
            _publish_runtime(path, path.relative_to(folder), layer)
    return Unpacked(len(fresh), len(staged) - len(fresh))


def _stage(stream: IO[bytes], file: Path, root: Path, folder: Path) -> tuple[list[_Staged], list[Path]]:
    """Everything in the pack, checked and written below `folder`: entries, and runtime libraries."""
    entries: list[_Staged] = []
    runtimes: list[Path] = []
    for place, content, side in _pairs(read_members(stream, str(file)), str(file)):
        where = f"{file}: {place}"
        if RUNTIME_MEMBER.match(f"{place}/{RUNTIME_LIBRARY}"):
            if hashlib.sha256(content).hexdigest().encode() != side:
                raise _bad(where, "a runtime library that differs from its digest", "the library as packed")
            runtimes.append(_write(folder / place / RUNTIME_LIBRARY, content, root))
        else:
            key, record = _checked(place, content, side, where)
            staged = _write(folder / str(len(entries)) / ARTIFACT, content, root)
            entries.append(_Staged(key, record, staged.parent))
    if not entries and not runtimes:
        raise _bad(str(file), "no entry", "at least one")
    return entries, runtimes


def _pairs(members: Iterator[tuple[str, bytes]], where: str) -> Iterator[tuple[str, bytes, bytes]]:
    """(folder, content, what vouches for it) of each artifact and each runtime library."""
    for name, content in members:
        place, _, kind = name.rpartition("/")
        wanted = {ARTIFACT: f"{place}/{RECORD}", RUNTIME_LIBRARY: f"{name}.sha256"}.get(kind)
        second, side = next(members, ("the end", b""))
        if second != wanted:
            raise _bad(f"{where}: {name}", f"{second} after it", "each artifact followed by its record")
        yield place, content, side


def _checked(place: str, content: bytes, record_bytes: bytes, where: str) -> tuple[Key, Record]:
    """The key and record of an entry that is whole: record, artifact and path belong together."""
    _, target_host, kernel, recipe, toolchain = place.split("/")
    target, _, host = target_host.partition("-")
    try:
        key = Key(target, host, kernel, recipe)
        record = record_from_bytes(record_bytes, where, key, toolchain)
        check_artifact(record, content, where)
    except ValueError:
        raise _bad(where, "a path that is no key's", "entries of this version") from None
    except EntryError as problem:
        raise _bad(where, problem.found, problem.needed) from None
    return key, record


def _present(layer: Layer, staged: _Staged) -> bool:
    """Whether the cache holds this entry, whole."""
    try:
        entry = read_entry(layer, staged.key, staged.record.toolchain_digest)
        return entry is not None and bool(entry.read_artifact())
    except (EntryError, FileNotFoundError):
        return False


def _write(path: Path, content: bytes, root: Path) -> Path:
    try:
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    except OSError as problem:
        raise cannot_write(root, problem) from problem
    return path


def _publish_runtime(staged: Path, place: Path, layer: Layer) -> None:
    """Give a runtime library its place below the root, unless one of equal content has it."""
    final = layer.root / place
    try:
        if final.is_file() and not final.is_symlink() and final.read_bytes() == staged.read_bytes():
            return
        sync(staged, FILE_MODE)
        folder = make_folder(layer.root, place.parent.parts, trusted=layer.trusted)
        try:
            os.replace(staged, final.name, dst_dir_fd=folder)
        finally:
            os.close(folder)
    except EntryError as problem:
        raise cannot_write(layer.root, OSError(f"{problem.where}: {problem.found}")) from problem
    except OSError as problem:
        raise cannot_write(layer.root, problem) from problem


def _bad(where: str, found: str, needed: str) -> PackError:
    return PackError(where=where, found=found, needed=needed, remedy="Make the pack again with `jitspark pack`.")
