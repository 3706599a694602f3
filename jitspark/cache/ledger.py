"""The ledger: last use, hits, misses, waits, compile seconds and bytes of each entry, for `stats` and `prune`.

A database in the writable layer, written in one best-effort go after a build; nothing depends on it, and a damaged one
is thrown away. It holds texts alone: a row that claims to be a pickle is refused, never read. Not on network file
systems, whose locks SQLite cannot rely on.
"""

import contextlib
import json
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import diskcache

from jitspark.cache.folders import make_folder
from jitspark.cache.staging import remove
from jitspark.cache.store import Entry, Layer
from jitspark.errors import EntryError

logger = logging.getLogger("jitspark")

LEDGER = "ledger"
WAIT_SECONDS = 0.5

_MAX_TEXT = 64 * 1024
# The layer that the ledger lies in: every container may have mounted it elsewhere.
_HERE = "."
_NETWORK = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "fuse")
_BROKEN = (sqlite3.Error, diskcache.Timeout, OSError, EntryError, ValueError, TypeError, KeyError, AttributeError)


@dataclass(frozen=True, slots=True)
class Use:
    """One use of an entry: whether it was waited for, and what compiling it took if this process did."""

    entry: Entry
    waited: bool = False
    compile_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """What the ledger knows of one entry. `layer` is its root, `last_use` seconds of the Unix epoch."""

    layer: str
    entry: str
    last_use: int
    bytes: int
    hits: int = 0
    misses: int = 0
    waits: int = 0
    compiles: int = 0
    compile_ms: int = 0


class TextDisk(diskcache.Disk):  # type: ignore[misc]
    """Stores texts as they are and refuses all else, both ways: diskcache would unpickle what a row says it is."""

    def put(self, key: Any) -> tuple[Any, bool]:
        return _text(key), True

    def get(self, key: Any, raw: Any) -> Any:
        if not raw:
            raise ValueError("a key that is no text")
        return _text(key)

    def store(self, value: Any, read: Any, key: Any = None) -> tuple[int, int, None, str]:  # noqa: ARG002 - diskcache's
        return 0, diskcache.core.MODE_RAW, None, _text(value)

    def fetch(self, mode: Any, filename: Any, value: Any, read: Any) -> Any:
        if mode != diskcache.core.MODE_RAW or filename is not None or read:
            raise ValueError("a value that is no text")
        return _text(value)


class _ImpatientCache(diskcache.Cache):  # type: ignore[misc]
    """Opening a cache writes to it, and diskcache would try that for a minute while another process has it locked."""

    @property
    def _sql_retry(self) -> Callable[..., Any]:
        deadline = time.monotonic() + WAIT_SECONDS

        def execute(statement: str, *arguments: Any, **options: Any) -> Any:
            while True:
                try:
                    return self._sql(statement, *arguments, **options)
                except sqlite3.OperationalError as problem:
                    if "locked" not in str(problem) or time.monotonic() > deadline:
                        raise
                    time.sleep(0.005)

        return execute


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > _MAX_TEXT:
        raise ValueError("not a text of the ledger")
    return value


def note(layer: Layer, uses: Sequence[Use]) -> None:
    """Add `uses` to the ledger of the writable `layer`. Never raises, and never waits for long."""
    try:
        with _opened(layer) as cache, cache.transact(retry=False):
            for use in uses:
                key, line = _with(use, cache, layer.root)
                cache.set(key, json.dumps(asdict(line)))
    except _BROKEN as problem:
        logger.debug("The ledger in %s takes nothing: %s", layer.root, problem)
        if _is_damage(problem):
            remove(layer.root / LEDGER)


def lines(layer: Layer) -> list[Line]:
    """Everything in the ledger of the writable `layer`; nothing when there is none or it is damaged."""
    if not (layer.root / LEDGER).is_dir():
        return []
    try:
        with _opened(layer) as cache:
            found = [_line(cache.get(key)) for key in list(cache)]
    except _BROKEN as problem:
        logger.debug("The ledger in %s cannot be read: %s", layer.root, problem)
        return []
    return [replace(line, layer=str(layer.root)) if line.layer == _HERE else line for line in found if line is not None]


def forget(layer: Layer, entries: Sequence[str]) -> None:
    """Drop the lines of entries of `layer` that are gone."""
    with contextlib.suppress(*_BROKEN), _opened(layer) as cache, cache.transact(retry=False):
        for entry in entries:
            cache.delete(_key(_HERE, entry))


def _with(use: Use, cache: Any, root: Path) -> tuple[str, Line]:
    entry = use.entry
    assert entry.layer is not None
    path = f"{entry.key.path}/{entry.toolchain}"
    layer = _HERE if entry.layer.root == root else str(entry.layer.root)
    key = _key(layer, path)
    line = _line(cache.get(key)) or Line(layer, path, 0, 0)
    compiled = use.compile_seconds is not None
    return key, replace(
        line,
        last_use=int(time.time()),
        bytes=entry.record.size,
        hits=line.hits + (not compiled and not use.waited),
        misses=line.misses + (compiled or use.waited),
        waits=line.waits + use.waited,
        compiles=line.compiles + compiled,
        compile_ms=line.compile_ms + round(1000 * (use.compile_seconds or 0.0)),
    )


def _key(layer: str, entry: str) -> str:
    return f"{layer}\n{entry}"


def _line(text: Any) -> Line | None:
    """The line that `text` holds; None for anything else, which the next use overwrites."""
    try:
        line = Line(**json.loads(text))
    except (ValueError, TypeError, RecursionError):
        return None
    counts = (line.last_use, line.bytes, line.hits, line.misses, line.waits, line.compiles, line.compile_ms)
    good = all(type(count) is int and 0 <= count < 2**62 for count in counts)
    return line if good and type(line.layer) is str and type(line.entry) is str else None


@contextlib.contextmanager
def _opened(layer: Layer) -> Iterator[Any]:
    if _on_network(layer.root):
        raise OSError("a network file system")
    os.close(make_folder(layer.root, (LEDGER,), trusted=layer.trusted))
    # No eviction: the ledger is small, and what it forgets is for `prune` to say.
    cache = _ImpatientCache(
        str(layer.root / LEDGER), timeout=WAIT_SECONDS, disk=TextDisk, disk_min_file_size=2**30, cull_limit=0
    )
    try:
        yield cache
    finally:
        cache.close()


def _is_damage(problem: Exception) -> bool:
    busy = isinstance(problem, (sqlite3.OperationalError, diskcache.Timeout, OSError, EntryError))
    return not busy


def _on_network(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    try:
        rows = mounts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    best, path = ("", ""), Path(os.path.realpath(path))
    for row in rows:
        fields, _, kind = row.partition(" - ")
        point = fields.split(" ")[4].replace("\\040", " ")
        if path.is_relative_to(point) and len(point) >= len(best[0]):
            best = (point, kind.split(" ")[0])
    return best[1].startswith(_NETWORK)
