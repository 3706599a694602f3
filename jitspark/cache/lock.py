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
from jitspark.notice import say_once

POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds a lock: process id, host name, what for, since when (seconds of the Unix epoch)."""

    pid: int
    node: str
    what: str
    since: float

    def alive(self) -> bool:
        """False for a process of this node that is gone: it was killed before it could say that it had let go."""
        return self.node != os.uname().nodename or os.path.exists(f"/proc/{self.pid}")

    def is_stuck(self) -> bool:
        """Whether the holder is stopped: it may never free what it holds. Waiting for a disk (D) is no such thing."""
        if self.node != os.uname().nodename:  # another container's process ids are not ours
            return False
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state in ("T", "t")


class Lock:
    """A held or free lock on `path`. The operating system frees it when its holder dies."""

    def __init__(self, path: Path) -> None:
        from filelock import UnixFileLock

        # The native lock or an error: a silent fall-back to marker files would outlive a killed holder.
        self._lock = UnixFileLock(path, mode=0o600, thread_local=False, fallback_to_soft=False)
        self._holder_path = path.with_suffix(".holder")

    def try_acquire(self, what: str) -> bool:
        """Take the lock if it is free; never waits. True too where locks do not work: they only save work."""
        from filelock import Timeout

        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            return False
        except (OSError, NotImplementedError) as problem:
            say_once(f"Ranks cannot share the compiling: locks in {self._holder_path.parent} do not work ({problem}).")
            return True
        self.note(what)
        return True

    def note(self, what: str) -> None:
        """Say what the lock is held for, from now on; only its holder may."""
        if not self._lock.is_locked:
            return
        holder = Holder(os.getpid(), os.uname().nodename, what, time.time())
        with contextlib.suppress(OSError):
            self._holder_path.write_text(json.dumps(asdict(holder)))

    def release(self) -> None:
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._holder_path.unlink()
            self._lock.release()

    def holder(self) -> Holder | None:
        """Who holds the lock, as far as known; for messages only."""
        try:
            value: Any = json.loads(self._holder_path.read_text())
            holder = Holder(int(value["pid"]), str(value["node"]), str(value["what"]), float(value["since"]))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return None
        return holder if holder.alive() else None


class LockDirectory:
    """The node's locks for one store root, and the compile slots that all roots share."""

    def __init__(self, directory: Path, keys: Path, slots: int) -> None:
        """`keys` is where the key locks lie: `keys_folder` of the root, or a private place when there is no root."""
        self._slots = directory / "slots"
        self._keys = keys
        self._slot_count = slots
        for folder in (directory, self._slots, keys):
            make_private_directory(folder)

    def key(self, digest: str) -> Lock:
        return Lock(self._keys / f"{digest}.lock")

    def slot(self, number: int) -> Lock:
        return Lock(self._slots / f"{number}.lock")

    def try_slot(self, what: str) -> Lock | None:
        """A free compile slot, now held by the caller; None when all are taken."""
        slots = (self.slot(number) for number in range(self._slot_count))
        return next((slot for slot in slots if slot.try_acquire(what)), None)

    def slot_holders(self) -> list[Holder]:
        found = (self.slot(number).holder() for number in range(self._slot_count))
        return [holder for holder in found if holder is not None]


def keys_folder(directory: Path, root: Path) -> Path:
    """Where the key locks of `root` lie below the node's lock directory."""
    return directory / hashlib.sha256(os.path.realpath(root).encode()).hexdigest()[:32]


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
