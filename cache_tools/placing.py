"""Something new beside the place it takes in the end: whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedRandom
from pathlib import Path

from jitspark.cache.folders import FILE_MODE, FOLDER_MODE
from jitspark.cache.staging import fresh_name
from jitspark.errors import PackError


@contextmanager
def new_file(file: Path) -> Iterator[BufferedRandom]:
    """A file beside `file` that takes its place in the end. Raises PackError when it cannot be written."""
    staged = file.with_name(f".{file.name}.{fresh_name()}")
    try:
        with staged.open("x+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(staged, file)
    except OSError as problem:
        raise _no_place(file, problem) from problem
    finally:
        staged.unlink(missing_ok=True)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that takes its place in the end. Raises PackError when there is something already."""
    if os.path.lexists(folder):
        raise PackError(
            where=str(folder),
            found="something there already",
            needed="a name for a new directory",
            remedy="Name another, or remove it first.",
        )
    staged = folder.with_name(f".{folder.name}.{fresh_name()}")
    try:
        staged.mkdir()
        staged.chmod(FOLDER_MODE)
        yield staged
        os.rename(staged, folder)
    except OSError as problem:
        raise _no_place(folder, problem) from problem
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def write_below(root: Path, path: str, content: bytes) -> None:
    """A file below `root`, with the modes of a cache root, whatever the umask."""
    file = root / path
    for folder in reversed(file.relative_to(root).parents[:-1]):
        if not (root / folder).is_dir():
            (root / folder).mkdir()
            (root / folder).chmod(FOLDER_MODE)
    file.write_bytes(content)
    file.chmod(FILE_MODE)


def _no_place(path: Path, problem: OSError) -> PackError:
    return PackError(
        where=str(path),
        found=problem.strerror or str(problem),
        needed="a place for the pack",
        remedy="Free space, or name a file elsewhere.",
    )
