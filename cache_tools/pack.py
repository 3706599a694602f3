"""`pack`: entries into one file whose bytes depend on nothing but them."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import IO

from cache_tools.archive import RUNTIME_LIBRARY, write_end, write_member
from jitspark.errors import PackError
from jitspark.staging import fresh_name
from jitspark.store import ARTIFACT, RECORD, Entry, entry_parts


@dataclass(frozen=True, slots=True)
class Packed:
    """What a pack came to: entries, and the file's size and digest."""

    entries: int
    size: int
    sha256: str


def pack(file: Path, entries: Iterable[Entry], runtime: tuple[str, Path] | None = None) -> Packed:
    """Write `entries` (of equal ones the first) to `file`, which appears whole or not at all.

    `runtime` adds a runtime library: its CUDA flavour and its path. Raises EntryError for a damaged entry, PackError
    when there is nothing to pack or the file cannot be written.
    """
    chosen: dict[str, Entry] = {}
    for entry in entries:
        chosen.setdefault("/".join(entry_parts(entry.key, entry.toolchain)), entry)
    if not chosen:
        raise PackError(
            where=str(file),
            found="no entry to pack",
            needed="at least one",
            remedy="Fill the cache with `jitspark warm`.",
        )
    with _new_file(file) as stream:
        for directory, entry in sorted(chosen.items()):
            write_member(stream, f"{directory}/{ARTIFACT}", entry.read_artifact())
            write_member(stream, f"{directory}/{RECORD}", entry.record.to_bytes())
        if runtime is not None:
            _write_runtime(stream, *runtime)
        write_end(stream)
        stream.seek(0)
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return Packed(len(chosen), stream.tell(), sha256)


def _write_runtime(stream: IO[bytes], flavour: str, path: Path) -> None:
    content = path.read_bytes()
    name = f"runtime-v1/{flavour}/{RUNTIME_LIBRARY}"
    write_member(stream, name, content)
    write_member(stream, f"{name}.sha256", hashlib.sha256(content).hexdigest().encode())


@contextmanager
def _new_file(file: Path) -> Iterator[BufferedRandom]:
    """A file beside `file` that takes its place in the end."""
    staged = file.with_name(f".{file.name}.{fresh_name()}")
    try:
        with staged.open("x+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(staged, file)
    except OSError as problem:
        raise PackError(
            where=str(file),
            found=problem.strerror or str(problem),
            needed="a place for the pack",
            remedy="Free space, or name a file elsewhere.",
        ) from problem
    finally:
        staged.unlink(missing_ok=True)
