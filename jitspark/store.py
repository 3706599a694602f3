"""The store: layers of roots that hold immutable entries. Lookups take no lock and write nothing.

    <root>/artifacts-v1/<target>-<host>/<kernel>/<recipe>/<toolchain>/{kernel.so, record.json}
    writable root only: staging/<node>.<pid>.<uuid>/  quarantine/<uuid>/  failures/<digest>.json  ledger/

An entry appears by one rename of a complete, flushed directory, so whoever sees its record sees all of it. What
lies in an entry is never trusted: bytes are checked against the record each time they are read.
"""

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jitspark.errors import CacheDirectoryError, EntryError
from jitspark.key import Key
from jitspark.record import MAX_ARTIFACT_BYTES, MAX_RECORD_BYTES, Record, check_artifact, record_from_bytes

ARTIFACTS = "artifacts-v1"
ARTIFACT = "kernel.so"
RECORD = "record.json"
WRITABLE_ONLY = ("staging", "quarantine", "failures", "ledger")


@dataclass(frozen=True, slots=True)
class Layer:
    """One root. Only the writable one is ever written to."""

    root: Path
    writable: bool


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
        """The artifact's bytes, checked against the record. Raises EntryError when they differ or cannot be read."""
        if self.content is not None:
            return self.content
        assert self.layer is not None
        parts = (*entry_parts(self.key, self.toolchain), ARTIFACT)
        content = read_below(self.layer.root, parts, MAX_ARTIFACT_BYTES)
        check_artifact(self.record, content, self.where)
        return content


def entry_parts(key: Key, toolchain: str) -> tuple[str, ...]:
    return (ARTIFACTS, *key.path.split("/"), toolchain)


def entry_directory(root: Path, key: Key, toolchain: str) -> Path:
    return root.joinpath(*entry_parts(key, toolchain))


def read_entry(layer: Layer, key: Key, toolchain: str) -> Entry | None:
    """The entry of `key` by `toolchain` in `layer`, None when there is none, EntryError when it is no good."""
    where = str(entry_directory(layer.root, key, toolchain) / RECORD)
    try:
        content = read_below(layer.root, (*entry_parts(key, toolchain), RECORD), MAX_RECORD_BYTES)
    except FileNotFoundError:
        return None
    return Entry(layer, key, toolchain, record_from_bytes(content, where, key, toolchain))


def toolchains_of(layer: Layer, key: Key) -> list[str]:
    """Digests of the toolchains that have an entry for `key` in `layer`, in the order that all processes share."""
    with contextlib.suppress(OSError):
        names = os.listdir(layer.root.joinpath(ARTIFACTS, *key.path.split("/")))
        return sorted(name for name in names if len(name) == 64 and all(c in "0123456789abcdef" for c in name))
    return []


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


def read_below(root: Path, parts: tuple[str, ...], limit: int) -> bytes:
    """The bytes of a regular file below `root`, no component of the way being a symbolic link.

    Raises FileNotFoundError when the file or a folder on the way is missing, EntryError when it is no regular
    file, larger than `limit`, or cannot be read.
    """
    where = "/".join((str(root), *parts))
    try:
        descriptor = _open_below(root, parts)
    except FileNotFoundError:
        raise
    except OSError as problem:
        raise _unreadable(where, problem.strerror or str(problem)) from None
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_size > limit:
            raise _unreadable(where, f"a file of mode {state.st_mode:o} and {state.st_size} bytes")
        return _read_all(descriptor, state.st_size)
    except OSError as problem:
        raise _unreadable(where, problem.strerror or str(problem)) from None
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, size: int) -> bytes:
    """Up to `size` bytes plus one, so that a file that grows meanwhile is noticed."""
    chunks: list[bytes] = []
    left = size + 1
    while left > 0 and (chunk := os.read(descriptor, left)):
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


def _open_below(root: Path, parts: tuple[str, ...]) -> int:
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            inner = os.open(part, flags, dir_fd=folder)
            os.close(folder)
            folder = inner
        # O_NONBLOCK: a pipe planted under an entry's name must not block the reader.
        return os.open(parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    finally:
        os.close(folder)


def _unreadable(where: str, found: str) -> EntryError:
    return EntryError(where=where, found=found, needed="a readable regular file", remedy="The entry is a miss.")


def root_problem(root: Path, trust_writable: bool) -> str | None:
    """Why `root` must not be used, or None. Loading an artifact runs its code, so others must not be able to put one there."""
    try:
        state = os.stat(root)
    except OSError as problem:
        return problem.strerror or str(problem)
    if not stat.S_ISDIR(state.st_mode):
        return "not a directory"
    if state.st_uid not in (0, os.geteuid()) and not trust_writable:
        return f"owned by uid {state.st_uid}"
    if state.st_mode & 0o022 and not trust_writable:
        return f"writable by others (mode {stat.S_IMODE(state.st_mode):04o})"
    return None


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A fresh private directory below `root`, gone afterwards unless it was published.

    Its name says which process made it, so that cleaning can tell an orphan from work under way.
    """
    folder = root / "staging" / f"{os.uname().nodename}.{os.getpid()}.{uuid.uuid4().hex}"
    try:
        os.makedirs(folder, mode=0o755)
    except OSError as problem:
        raise cannot_write(root, problem) from problem
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(root: Path, key: Key, record: Record, staged: Path) -> Entry:
    """Make `staged` (which holds kernel.so) the entry of `key`, record last, by one rename.

    Losing the race to another builder is success: theirs stands, and it is what is returned.
    Raises CacheDirectoryError when the root cannot be written to; nothing is half-written then.
    """
    toolchain = record.toolchain_digest
    final = entry_directory(root, key, toolchain)
    try:
        _flush(staged / ARTIFACT, 0o444)
        (staged / RECORD).write_bytes(record.to_bytes())
        _flush(staged / RECORD, 0o444)
        _flush(staged, 0o755)
        os.makedirs(final.parent, mode=0o755, exist_ok=True)
        layer = Layer(root, writable=True)
        if not _rename(staged, final) and not _stands(layer, key, toolchain):
            quarantine(final, root)
            _rename(staged, final)
        _flush(final.parent, None)
    except OSError as problem:
        raise cannot_write(root, problem) from problem
    return Entry(layer, key, toolchain, record)


def _rename(staged: Path, final: Path) -> bool:
    """False when another builder's entry stands there."""
    try:
        os.rename(staged, final)
    except OSError as problem:
        if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _stands(layer: Layer, key: Key, toolchain: str) -> bool:
    """Whether the entry that won the race is whole."""
    try:
        entry = read_entry(layer, key, toolchain)
        return entry is not None and bool(entry.read_artifact())
    except (EntryError, FileNotFoundError):
        return False


def _flush(path: Path, mode: int | None) -> None:
    if mode is not None:
        os.chmod(path, mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def quarantine(entry_path: Path, root: Path) -> bool:
    """Move a bad entry out of the way, into `root`'s quarantine. False when that cannot be done."""
    try:
        os.makedirs(root / "quarantine", mode=0o755, exist_ok=True)
        os.rename(entry_path, root / "quarantine" / uuid.uuid4().hex)
    except OSError:
        return False
    return True


def cannot_write(root: Path, problem: OSError) -> CacheDirectoryError:
    return CacheDirectoryError(
        where=f"cache directory {root}",
        found=problem.strerror or str(problem),
        needed="a directory that this process can write to, with free space",
        remedy="Free space or mend its permissions, or set JITSPARK_CACHE_DIR to another directory.",
    )
