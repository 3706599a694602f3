"""One compile under way: the lock on its key, and the directory that the compiler writes to."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jitspark.compiler_child import Answer
from jitspark.errors import CacheDirectoryError, CompileError
from jitspark.folders import cannot_write
from jitspark.lock import Lock
from jitspark.progress import Wanted
from jitspark.staging import staging
from jitspark.store import ARTIFACT, Layer

logger = logging.getLogger("jitspark")

# More than any artifact so far, so that a disk without room for one shows.
_ROOM = 1024 * 1024


class CompileJob:
    """Holds the key's lock, and keeps `directory`, until `close`. Takes over `lock`."""

    def __init__(self, item: Wanted, lock: Lock, layer: Layer | None, *, must_publish: bool) -> None:
        """Raises CacheDirectoryError when `must_publish` and `layer` has no place for the directory."""
        self.item = item
        self.tries = 1
        self._root = None if layer is None else layer.root
        with ExitStack() as stack:
            stack.callback(lock.release)
            self.directory = stack.enter_context(_work_directory(layer, must_publish=must_publish))
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()

    def read_artifact(self, answer: Answer) -> bytes:
        """What the child says it wrote. Raises CompileError when there is nothing."""
        try:
            content = (self.directory / ARTIFACT).read_bytes()
        except OSError:
            content = b""
        if not content or not answer.signature:
            raise CompileError(
                where=self.item.specialization.title(),
                found="an answer from the compiler, but no artifact",
                needed=ARTIFACT,
                remedy="Run `jitspark doctor`.",
            )
        return content

    def lack_of_room(self) -> CacheDirectoryError | None:
        """Why nothing can be written where the compiler writes, if so: a full disk looks like a failed compile."""
        probe = self.directory / "room"
        try:
            with probe.open("wb") as stream:
                stream.write(bytes(_ROOM))
                stream.flush()
                os.fsync(stream.fileno())
            probe.unlink()
        except OSError as problem:
            return cannot_write(self._root or self.directory, problem)
        return None


@contextmanager
def _work_directory(layer: Layer | None, *, must_publish: bool) -> Iterator[Path]:
    """Where a child writes: beside the store, so that publishing is a rename, or anywhere when there is no store."""
    if layer is not None:
        try:
            with staging(layer.root, trusted=layer.trusted) as folder:
                yield folder
                return
        except CacheDirectoryError as problem:
            if must_publish:
                raise
            logger.info("%s", problem)
    with tempfile.TemporaryDirectory(prefix="jitspark-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)
