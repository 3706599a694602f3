"""What `doctor` checks of the cache roots: whom they belong to, their space, and that locks and renames work there."""

import os
from pathlib import Path

from cache_tools.roots import writable_layer
from jitspark.cache.folders import root_problem
from jitspark.cache.lock import LockDirectory, keys_folder
from jitspark.cache.staging import staging
from jitspark.doctor.check import FailedError
from jitspark.errors import CacheDirectoryError
from jitspark.settings import Settings

NEEDED_BYTES = 256 * 1024 * 1024


def read_only_roots(settings: Settings) -> str:
    problems = {root: root_problem(root, settings.trust_writable_roots) for root in settings.cache_path}
    bad = [f"{root}: {problem}" for root, problem in problems.items() if problem is not None]
    if bad:
        raise FailedError("; ".join(bad), "Mend JITSPARK_CACHE_PATH, or the owner and mode of these roots.")
    return ", ".join(map(str, settings.cache_path)) or "none"


def cache_root(settings: Settings) -> str:
    state = _root(settings).stat()
    return f"{settings.cache_dir}, owner {state.st_uid}, mode {state.st_mode & 0o7777:04o}, can be written to"


def _root(settings: Settings) -> Path:
    """The writable root. Without one it is a failure, unless compiling is forbidden: then nothing need be written."""
    try:
        return writable_layer(settings).root
    except CacheDirectoryError as error:
        text = f"{error.where}: found {error.found}"
        raise FailedError(text, error.remedy, needed=settings.compile != "never") from None


def free_space(settings: Settings) -> str:
    space = os.statvfs(_root(settings))
    free = space.f_bavail * space.f_frsize
    if free < NEEDED_BYTES:
        raise FailedError(f"{free} bytes", f"Free some: a deployment's kernels need up to {NEEDED_BYTES} bytes.")
    return f"{free // 2**20} MiB"


def locks(settings: Settings) -> str:
    """Two lockers of one key exclude each other, and the second gets it when the first lets go."""
    keys = keys_folder(settings.lock_dir, Path("/jitspark-doctor"))
    locks = LockDirectory(settings.lock_dir, keys, settings.compile_slots)
    first, second = locks.key(f"doctor-{os.getpid()}"), locks.key(f"doctor-{os.getpid()}")
    try:
        taken = first.try_acquire("doctor")
        both = second.try_acquire("doctor")
        first.release()
        after = both or second.try_acquire("doctor")
    finally:
        first.release()
        second.release()
    if not taken or both or not after:
        raise FailedError(
            f"{settings.lock_dir}: locks do not exclude", "Set XDG_RUNTIME_DIR to a directory in local memory."
        )
    return f"{settings.lock_dir}, {settings.compile_slots} compile slots"


def rename(settings: Settings) -> str:
    """A folder moves in one step, and never onto one that holds something."""
    with staging(_root(settings)) as folder:
        for name in ("first", "second"):
            (folder / name).mkdir()
            (folder / name / "file").write_text(name)
        os.rename(folder / "first", folder / "final")
        try:
            os.rename(folder / "second", folder / "final")
        except OSError:
            return "folders are renamed in one step, never over one another"
    raise FailedError(
        "a folder was renamed over another", "Set JITSPARK_CACHE_DIR to a directory on another file system."
    )
