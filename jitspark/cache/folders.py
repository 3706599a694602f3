"""Files below a root, reached folder by folder: none on the way may be a symbolic link, or be anybody else's to change.

Loading an artifact runs its code, so every folder is checked as it is opened: a root that is swapped after its first
check is noticed at the next read. Everything made here has modes of its own, whatever the umask says.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jitspark.errors import CacheDirectoryError, EntryError

T = TypeVar("T")

FOLDER_MODE = 0o755
FILE_MODE = 0o444

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: a pipe planted under an entry's name must not block the reader.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# A symbolic link or a file where a folder belongs.
_NO_FOLDER = (errno.ELOOP, errno.ENOTDIR)
_STALE_TRIES = 3


def root_problem(root: Path, trust_writable: bool) -> str | None:  # noqa: FBT001 - the setting's own name and type
    """Why `root` must not be used, or None: it belongs to this user or root, and no other may write to it."""
    try:
        link, state = os.lstat(root), os.stat(root)
    except OSError as problem:
        return problem.strerror or str(problem)
    if not stat.S_ISDIR(state.st_mode):
        return "not a directory"
    if trust_writable:
        return None
    if link.st_uid not in (0, os.geteuid()):  # somebody else's link would decide where we read and write
        return f"owned by uid {link.st_uid}"
    return _distrust(state)


def _distrust(state: os.stat_result) -> str | None:
    if state.st_uid not in (0, os.geteuid()):
        return f"owned by uid {state.st_uid}"
    if state.st_mode & 0o022:
        return f"writable by others (mode {stat.S_IMODE(state.st_mode):04o})"
    return None


def open_folder(root: Path, parts: tuple[str, ...], *, trusted: bool = False) -> int:
    """A descriptor of the folder `parts` below `root`; `trusted` accepts folders that others may change.

    Raises FileNotFoundError when it is missing, EntryError when a component is no folder or not to be trusted.
    """
    folder = os.open(root, _FOLDER)
    try:
        _check(folder, root, (), trusted=trusted)
        for depth in range(1, len(parts) + 1):
            folder = _step(folder, root, parts[:depth])
            _check(folder, root, parts[:depth], trusted=trusted)
    except BaseException:
        os.close(folder)
        raise
    return folder


def is_fit(root: Path, parts: tuple[str, ...], name: str, *, trusted: bool) -> bool:
    """Whether `name` in the folder `parts` below `root` is a regular file that is there and may be trusted."""
    if root_problem(root, trusted) is not None:
        return False
    try:
        folder = open_folder(root, parts, trusted=trusted)
        try:
            state = os.stat(name, dir_fd=folder, follow_symlinks=False)
        finally:
            os.close(folder)
    except (OSError, EntryError):
        return False
    return stat.S_ISREG(state.st_mode) and (trusted or _distrust(state) is None)


def make_folder(root: Path, parts: tuple[str, ...], *, trusted: bool = False) -> int:
    """As `open_folder`, but folders that are missing below `root` are made."""
    folder = os.open(root, _FOLDER)
    try:
        _check(folder, root, (), trusted=trusted)
        for depth, part in enumerate(parts, 1):
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, FOLDER_MODE, dir_fd=folder)
                os.chmod(part, FOLDER_MODE, dir_fd=folder)
            folder = _step(folder, root, parts[:depth])
            _check(folder, root, parts[:depth], trusted=trusted)
    except BaseException:
        os.close(folder)
        raise
    return folder


def make_root(root: Path, mode: int = FOLDER_MODE) -> None:
    """Make `root` and the folders above it that are missing."""
    for folder in (*reversed(root.parents), root):
        if not folder.is_dir():
            try:
                os.mkdir(folder, mode)
                os.chmod(folder, mode)
            except FileExistsError:
                if not folder.is_dir():  # else somebody was quicker
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None


def _step(folder: int, root: Path, parts: tuple[str, ...]) -> int:
    """The folder `parts[-1]` inside `folder`, which is closed."""
    try:
        inner = os.open(parts[-1], _FOLDER | os.O_NOFOLLOW, dir_fd=folder)
    except OSError as problem:
        if problem.errno in _NO_FOLDER:
            raise _bad(place(root, parts), "a link or a file") from None
        raise
    os.close(folder)
    return inner


def _check(folder: int, root: Path, parts: tuple[str, ...], *, trusted: bool) -> None:
    if not trusted and (problem := _distrust(os.fstat(folder))) is not None:
        raise _bad(place(root, parts), f"a folder {problem}")


def read_below(root: Path, parts: tuple[str, ...], limit: int, *, trusted: bool = False) -> bytes:
    """The bytes of the regular file `parts` below `root`. Raises what `in_folder` and `read_file` do."""
    where = place(root, parts)
    return in_folder(
        root, parts[:-1], lambda folder: read_file(folder, parts[-1], limit, where, trusted=trusted), trusted=trusted
    )


def in_folder(root: Path, parts: tuple[str, ...], read: Callable[[int], T], *, trusted: bool = False) -> T:
    """What `read` makes of a descriptor of the folder.

    Raises FileNotFoundError when something is missing, and EntryError otherwise: with the OSError as its cause when the
    system could not read, which says nothing about what is there; without one when what is there is no good.
    """
    for left in reversed(range(_STALE_TRIES)):
        try:
            folder = open_folder(root, parts, trusted=trusted)
            try:
                return read(folder)
            finally:
                os.close(folder)
        except FileNotFoundError:
            raise
        except OSError as problem:
            if problem.errno != errno.ESTALE or not left:  # a server replaced it under us: look again
                raise _bad(place(root, parts), problem.strerror or str(problem)) from problem
    raise AssertionError("the last try returns or raises")


def read_file(folder: int, name: str, limit: int, where: str, *, trusted: bool) -> bytes:
    """The bytes of the regular file `name` in `folder`. Raises OSError, and EntryError when it is no such file."""
    try:
        descriptor = os.open(name, _FILE, dir_fd=folder)
    except OSError as problem:
        if problem.errno in (*_NO_FOLDER, errno.ENXIO):
            raise _bad(where, "a link, a pipe or a device") from None
        raise
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or state.st_size > limit:
            raise _bad(where, f"a file of mode {state.st_mode:o} and {state.st_size} bytes")
        if not trusted and (reason := _distrust(state)) is not None:
            raise _bad(where, f"a file {reason}")
        return _read_all(descriptor, state.st_size)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, size: int) -> bytes:
    """Up to `size` bytes plus one, so that a file that grows meanwhile is noticed."""
    content = os.read(descriptor, size + 1)
    while len(content) < size and (more := os.read(descriptor, size + 1 - len(content))):
        content += more
    return content


def sync(path: Path | str, mode: int | None = None, *, folder: int | None = None) -> None:
    """Force a file or folder to disk, with its final mode."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        if mode is not None:
            os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cannot_write(root: Path, problem: OSError) -> CacheDirectoryError:
    return CacheDirectoryError(
        where=f"cache directory {root}",
        found=problem.strerror or str(problem),
        needed="a directory that this process can write to, with free space",
        remedy="Free space or mend its permissions, or set JITSPARK_CACHE_DIR to another directory.",
    )


def place(root: Path, parts: tuple[str, ...]) -> str:
    """A path below `root` as text, for messages."""
    return "/".join((str(root), *parts))


def _bad(where: str, found: str) -> EntryError:
    return EntryError(
        where=where,
        found=found,
        needed="a readable regular file that only this user or root may change",
        remedy="The entry is a miss; mend or remove it.",
    )
