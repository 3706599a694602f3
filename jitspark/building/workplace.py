"""Where a build works: the node's locks, and a temporary directory of this process' own.

Compiler children write there, not below the root: a full or strange file system under the root then matters to
publishing alone. What a killed process leaves behind, the next build removes.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jitspark.cache.folders import make_folder
from jitspark.cache.lock import LockDirectory, keys_folder
from jitspark.cache.staging import STAGING, owned_name, sweep, sweep_temporary
from jitspark.cache.store import Layer
from jitspark.errors import CacheDirectoryError, EntryError
from jitspark.notice import say_once
from jitspark.settings import Settings

PREFIX = "jitspark-"
# A kernel's object, artifact and log take well under a megabyte.
NEEDED_BYTES = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Workplace:
    """`folder` is this process' own and goes when the build ends."""

    folder: Path
    locks: LockDirectory

    def is_full(self) -> bool:
        """Whether a failed compile may have failed for want of space."""
        with contextlib.suppress(OSError):
            space = os.statvfs(self.folder)
            return space.f_bavail * space.f_frsize < NEEDED_BYTES
        return True


@contextlib.contextmanager
def workplace(settings: Settings, layer: Layer | None) -> Iterator[Workplace]:
    """Raises CacheDirectoryError when there is no place for temporary files at all."""
    if layer is not None:
        sweep(layer.root)
    folder = _make_folder(layer)
    try:
        yield Workplace(folder, _locks(settings, layer, folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_folder(layer: Layer | None) -> Path:
    """In the system's temporary directory, or else below the root."""
    name = f"{PREFIX}{owned_name()}"
    found = "none that can be written to"
    try:
        temporary = Path(tempfile.gettempdir())
        sweep_temporary(temporary, PREFIX)
        (temporary / name).mkdir(0o700)
    except OSError as problem:
        found = problem.strerror or str(problem)
    else:
        return temporary / name
    with contextlib.suppress(OSError, EntryError):
        if layer is not None:
            os.close(make_folder(layer.root, (STAGING,), trusted=layer.trusted))
            (layer.root / STAGING / name).mkdir(0o700)
            return layer.root / STAGING / name
    raise CacheDirectoryError(
        where="temporary directory",
        found=found,
        needed="a directory that this process can write to, with free space",
        remedy="Free space, or set TMPDIR to another directory.",
    )


def _locks(settings: Settings, layer: Layer | None, folder: Path) -> LockDirectory:
    """The node's locks. Where none can be made, private ones: then work is done twice, with the same results."""
    directory = settings.lock_dir
    try:
        keys = folder / "locks" if layer is None else keys_folder(directory, layer.root)
        return LockDirectory(directory, keys, settings.compile_slots)
    except CacheDirectoryError as problem:
        say_once(f"Ranks cannot share the compiling: {problem}")
        return LockDirectory(folder / "locks", folder / "locks" / "keys", settings.compile_slots)
