"""Compiler children at work: each sits in one of the node's compile slots and compiles one key at a time.

A slot is held exactly as long as a child lives, so a node never has more children than slots.
"""

import contextlib
import selectors
import shutil
import tempfile
from pathlib import Path

from jitspark.building.compiler_child import CompilerChild
from jitspark.building.progress import Wanted
from jitspark.cache.lock import Lock
from jitspark.cache.record import check_library
from jitspark.cache.store import ARTIFACT
from jitspark.errors import CompileError, EntryError, ToolchainError


class Job:
    """A compile under way. The key's lock is held and `directory` exists until `close`."""

    def __init__(self, item: Wanted, lock: Lock, folder: Path) -> None:
        self.item = item
        self.tries = 1
        self._lock = lock
        self.directory = Path(tempfile.mkdtemp(dir=folder))

    def artifact(self) -> bytes:
        """What the child wrote. An answer without a file, or with part of one, is a failed compile."""
        content, found = b"", "no artifact"
        try:
            content = (self.directory / ARTIFACT).read_bytes()
            check_library(content, ARTIFACT)
        except OSError:
            pass
        except EntryError as problem:
            found = problem.found if content else found
        else:
            return content
        raise CompileError(
            where=self.item.specialization.title(),
            found=f"an answer from the compiler, but {found}",
            needed=ARTIFACT,
            remedy="Run `jitspark doctor`.",
        )

    def close(self) -> None:
        self._lock.release()
        shutil.rmtree(self.directory, ignore_errors=True)


class Seat:
    """A compile slot that this process holds, the child that lives in it, and what the child is compiling."""

    def __init__(self, slot: Lock, child: CompilerChild) -> None:
        self.slot = slot
        self.child = child
        self.job: Job | None = None

    def ask(self) -> None:
        """Hand the job to the child, and say in the slot since when."""
        assert self.job is not None
        self.slot.note(self.job.item.specialization.title())
        self.child.ask(self.job.item.specialization, self.job.item.key, self.job.directory)


class Seats:
    """This process' seats. `folder` takes the children's temporary files."""

    def __init__(self, command: tuple[str, ...], folder: Path) -> None:
        self._command = command
        self._folder = folder
        self._seats: list[Seat] = []
        self._selector = selectors.DefaultSelector()

    def __len__(self) -> int:
        return len(self._seats)

    def working(self) -> list[tuple[Seat, Job]]:
        return [(seat, seat.job) for seat in self._seats if seat.job is not None]

    def idle(self) -> list[Seat]:
        return [seat for seat in self._seats if seat.job is None]

    def answered(self, seconds: float) -> list[Seat]:
        """Seats whose child has answered or died; waits that long for the first."""
        return [event.data for event, _ in self._selector.select(seconds)]

    def add(self, slot: Lock, job: Job) -> None:
        """Start a child in `slot` and hand it `job`."""
        seat = Seat(slot, self._new_child())
        self._seats.append(seat)
        self._selector.register(seat.child, selectors.EVENT_READ, seat)
        self.start(seat, job)

    def start(self, seat: Seat, job: Job) -> None:
        seat.job = job
        if seat.child.worn:
            self.replace_child(seat)
        seat.ask()

    def replace_child(self, seat: Seat) -> None:
        self._selector.unregister(seat.child)
        seat.child.close()
        seat.child = self._new_child()
        self._selector.register(seat.child, selectors.EVENT_READ, seat)

    def leave(self, seat: Seat) -> None:
        """End the child and free its slot; an unfinished job is dropped."""
        with contextlib.suppress(KeyError, ValueError):  # it was closed already when no other could be started
            self._selector.unregister(seat.child)
        self._seats.remove(seat)
        seat.child.close()
        seat.slot.release()
        if seat.job is not None:
            seat.job.close()

    def end(self) -> None:
        """Kill the children and free every lock."""
        for seat in list(self._seats):
            self.leave(seat)
        self._selector.close()

    def _new_child(self) -> CompilerChild:
        try:
            return CompilerChild(self._command, beside=self._folder)
        except OSError as problem:
            raise ToolchainError(
                where="compiler",
                found=f"no child process can be started ({problem.strerror or problem})",
                needed="a process, and space for its temporary files",
                remedy="Free memory or disk space, or warm the cache elsewhere.",
            ) from problem
