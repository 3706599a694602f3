"""Node-local exclusion: one lock per key, and a node-wide number of compile slots.

Locks only save work. They lie in node-local memory, so ranks of a node exclude each other whatever file system the
cache is on; every result is the same, only made twice, if they do nothing. Lock files are never removed: unlinking
one that another process holds open would split the waiters.
"""

import contextlib
import hashlib
import json
import os
import stat
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jitspark.errors import CacheDirectoryError

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock: process id, host name, what for, since when (seconds of the Unix epoch)."""

    pid: int
    node: str
    what: str
    since: float


class Lock:
    """A held or free lock on `path`. The operating system frees it when its holder dies."""

    def __init__(self, path: Path) -> None:
        from filelock import UnixFileLock

        # The native lock or an error: a silent fall-back to marker files would outlive a killed holder.
        self._lock = UnixFileLock(path, mode=0o600, thread_local=False, fallback_to_soft=False)
        self._holder_path = path.with_suffix(".holder")

    def try_acquire(self, what: str) -> bool:
        """Take the lock if it is free; never waits. False too when this file system cannot lock."""
        from filelock import Timeout

        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return False
        holder = Holder(os.getpid(), os.uname().nodename, what, time.time())
        with contextlib.suppress(OSError):
            self._holder_path.write_text(json.dumps(asdict(holder)))
        return True

    def release(self) -> None:
        self._lock.release()

    def holder(self) -> Holder | None:
        """Who took the lock last, as far as known; for messages only."""
        try:
            value: Any = json.loads(self._holder_path.read_text())
            return Holder(int(value["pid"]), str(value["node"]), str(value["what"]), float(value["since"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None


class LockDirectory:
    """The node's locks for one store root, and the compile slots that all roots share."""

    def __init__(self, directory: Path, root: Path | None, slots: int) -> None:
        self._slots = directory / "slots"
        name = hashlib.sha256(os.path.realpath(root).encode()).hexdigest()[:32] if root else f"memory-{os.getpid()}"
        self._keys = directory / name
        self._slot_count = slots
        for folder in (directory, self._slots, self._keys):
            make_private_directory(folder)

    def key(self, digest: str) -> Lock:
        return Lock(self._keys / f"{digest}.lock")

    def try_slot(self, what: str) -> Lock | None:
        """A free compile slot, now held by the caller; None when all are taken."""
        for number in range(self._slot_count):
            slot = Lock(self._slots / f"{number}.lock")
            if slot.try_acquire(what):
                return slot
        return None

    def slot_holders(self) -> list[Holder]:
        found = (Lock(self._slots / f"{number}.lock").holder() for number in range(self._slot_count))
        return [holder for holder in found if holder is not None]


def make_private_directory(folder: Path) -> None:
    """Make `folder` with mode 0700, or accept it if it is a directory of this user that no other may write to."""
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        state = os.lstat(folder)
    except OSError as problem:
        raise _unusable(folder, problem.strerror or str(problem)) from None
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.geteuid() or state.st_mode & 0o022:
        raise _unusable(folder, f"owner {state.st_uid}, mode {stat.S_IMODE(state.st_mode):04o}")


def _unusable(folder: Path, found: str) -> CacheDirectoryError:
    return CacheDirectoryError(
        where=f"lock directory {folder}",
        found=found,
        needed="a directory of this user that no other may write to",
        remedy="Remove it, or set XDG_RUNTIME_DIR to a private directory.",
    )
