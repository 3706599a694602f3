"""Work under way below a writable root, and what killed processes left of it.

A staging folder's name says who made it, `<node>.<machine>.<pid>.<random>`, so that cleaning tells an orphan from work
under way: at once where process ids mean the same to both, by age elsewhere.
"""

import contextlib
import functools
import hashlib
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from jitspark.cache.folders import FOLDER_MODE, cannot_write, make_folder
from jitspark.errors import EntryError

STAGING = "staging"
QUARANTINE = "quarantine"
# No step that stages takes longer than minutes, and nobody looks into the quarantine for longer than a week.
ORPHAN_SECONDS = 24 * 3600.0
QUARANTINE_SECONDS = 7 * 24 * 3600.0

_OWNED = re.compile(r"(?:.*\.)?(?P<machine>[0-9a-f]{16})\.(?P<pid>[0-9]{1,10})\.[0-9a-z_]+\Z")


@functools.cache
def _machine() -> str:
    """What process ids are relative to: this boot of this machine, and the process id namespace."""
    boot = b"unknown"
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    namespace = 0
    with contextlib.suppress(OSError):
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return hashlib.sha256(b"%s %d" % (boot.strip(), namespace)).hexdigest()[:16]


def fresh_name() -> str:
    """A name that nothing else bears: 128 random bits. (`uuid` gives as many, and takes 4 ms to import.)"""
    return os.urandom(16).hex()


def owned_name() -> str:
    """A fresh name for something that only this process works on."""
    return f"{os.uname().nodename}.{_machine()}.{os.getpid()}.{fresh_name()}"


@contextlib.contextmanager
def staging(root: Path, *, trusted: bool = False) -> Iterator[Path]:
    """A fresh folder below `root`, gone afterwards unless it was published.

    Raises CacheDirectoryError when it cannot be made.
    """
    folder = root / STAGING / owned_name()
    try:
        os.close(make_folder(root, (STAGING,), trusted=trusted))
        folder.mkdir(FOLDER_MODE)
    except EntryError as problem:
        raise cannot_write(root, OSError(problem.found)) from problem
    except OSError as problem:
        raise cannot_write(root, problem) from problem
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_orphan(name: str, age: float) -> bool:
    """Whether what bears this name, `age` seconds old, is nobody's any more."""
    owned = _OWNED.match(name)
    if owned and owned["machine"] == _machine():  # whatever its age: clocks jump
        return not _alive(int(owned["pid"]))
    return age > ORPHAN_SECONDS


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def sweep(root: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove orphaned staging folders and old quarantined entries below `root`; which ones those are. Best effort."""
    now, found = time.time(), []
    if not os.path.islink(root / STAGING):  # what a link leads to is not ours
        found += [path for path, age in _aged(root / STAGING, now) if is_orphan(path.name, age)]
    if not os.path.islink(root / QUARANTINE):
        found += [path for path, age in _aged(root / QUARANTINE, now) if age > QUARANTINE_SECONDS]
    for path in found:
        if not dry_run:
            remove(path)
    return found


def sweep_temporary(folder: Path, prefix: str) -> None:
    """Remove what killed processes of this user left in a temporary directory that others share.

    A name that no build makes is not ours to remove: a cache of last resort, locks or anybody's work may lie there.
    """
    for path, age in _aged(folder, time.time(), prefix):
        name = path.name.removeprefix(prefix)
        if _OWNED.match(name) and is_orphan(name, age):
            remove(path)


def remove(path: Path) -> None:
    """Remove a folder or a file, as far as possible; links are removed, never followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _aged(folder: Path, now: float, prefix: str = "") -> Iterator[tuple[Path, float]]:
    """What lies in `folder`, is this user's and bears the prefix, with its age in seconds since it was last moved."""
    with contextlib.suppress(OSError):
        for name in sorted(name for name in os.listdir(folder) if name.startswith(prefix)):
            with contextlib.suppress(OSError):
                state = os.lstat(folder / name)
                if state.st_uid == os.geteuid() and not stat.S_ISLNK(state.st_mode):
                    yield folder / name, now - state.st_ctime
