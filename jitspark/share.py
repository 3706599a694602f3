"""One process' share of the compiling: each key is compiled once per node, whoever does it.

Whoever holds a compile slot takes the keys that nobody else holds; the others watch for entries to appear, and take
over as soon as a holder dies, since the operating system frees its locks. A slot is held exactly as long as a
compiler child lives, so a node never has more children than slots.
"""

import logging
import os
import selectors
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from jitspark.compiler_child import Answer, ChildDied, CompilerChild
from jitspark.errors import CacheDirectoryError, CompileError, JitsparkError
from jitspark.failures import forget_failure, remember_failure, remembered_failure
from jitspark.lock import POLL_SECONDS, Lock, LockDirectory
from jitspark.progress import Progress, Wanted
from jitspark.record import Record
from jitspark.settings import Settings
from jitspark.store import ARTIFACT, Entry, publish, staging
from jitspark.toolchain import CUDA_FLAVOUR

logger = logging.getLogger("jitspark")

REPORT_SECONDS = 2.0
TRIES = 2


class _Job:
    """A compile under way. The key's lock is held and `directory` exists until `close`."""

    def __init__(self, item: Wanted, lock: Lock, root: Path | None) -> None:
        self.item = item
        self.tries = 1
        self._stack = ExitStack()
        self._stack.callback(lock.release)
        self.directory = self._stack.enter_context(_work_directory(root))

    def close(self) -> None:
        self._stack.close()


@dataclass(slots=True)
class _Seat:
    """A compile slot that this process holds, the child that lives in it, and what the child is compiling."""

    slot: Lock
    child: CompilerChild
    job: _Job | None = None


def compile_missing(
    missing: Sequence[Wanted],
    progress: Progress,
    settings: Settings,
    *,
    jobs: int,
    retry: bool,
    command: tuple[str, ...],
) -> None:
    """Return when every item of `missing` is settled, by this process or by another."""
    with ExitStack() as stack:
        locks = _lock_directory(settings, progress.lookup.roots.writable, stack)
        share = _Share(missing, progress, locks, jobs, command)
        stack.callback(share.end)
        if retry:
            share.forget_failures()
        share.run()


class _Share:
    def __init__(
        self, missing: Sequence[Wanted], progress: Progress, locks: LockDirectory, jobs: int, command: tuple[str, ...]
    ) -> None:
        # Every process starts elsewhere in the list, so that they seldom ask for the same lock.
        start = os.getpid() % len(missing)
        self._missing = [*missing[start:], *missing[:start]]
        self._progress = progress
        self._root = progress.lookup.roots.writable
        self._toolchain = progress.lookup.own or ""
        self._locks = locks
        self._jobs = jobs
        self._command = command
        self._seats: list[_Seat] = []
        self._selector = selectors.DefaultSelector()
        self._last_news = self._last_report = time.monotonic()

    def run(self) -> None:
        while open_items := self._progress.unsettled(self._missing):
            held = {seat.job.item.key for seat in self._seats if seat.job is not None}
            free = [item for item in open_items if item.key not in held and not self._settle(item)]
            self._fill_seats(free)
            self._report_waiting(free)
            for event, _ in self._selector.select(POLL_SECONDS):
                self._take_answer(event.data)
            self._end_overdue()

    def forget_failures(self) -> None:
        if self._root is not None:
            for item in self._missing:
                forget_failure(self._root, item.key, self._toolchain)

    def end(self) -> None:
        """Kill the children and free every lock."""
        for seat in list(self._seats):
            self._leave(seat)
        self._selector.close()

    def _settle(self, item: Wanted) -> bool:
        """Settle `item` if another process compiled it, or failed to."""
        if self._progress.settle_if_found(item):
            self._last_news = time.monotonic()
            return True
        failure = remembered_failure(self._root, item.key, self._toolchain) if self._root else None
        if failure is not None:
            self._progress.settle_failed(item, failure)
        return failure is not None

    def _fill_seats(self, free: list[Wanted]) -> None:
        for seat in [seat for seat in self._seats if seat.job is None]:
            job = self._next_job(free)
            if job is None:
                self._leave(seat)
            else:
                self._start(seat, job)
        while free and len(self._seats) < self._jobs and (slot := self._locks.try_slot("compiling")) is not None:
            job = self._next_job(free)
            if job is None:
                slot.release()
                return
            self._start(self._new_seat(slot), job)

    def _next_job(self, free: list[Wanted]) -> _Job | None:
        """The first free key that nobody holds, locked; `free` loses what is taken or settled."""
        for item in list(free):
            lock = self._locks.key(item.key.recipe)
            if not lock.try_acquire(item.specialization.title()):
                continue
            free.remove(item)
            # Its holder may have published between our look and our lock.
            if not self._settle(item):
                return _Job(item, lock, self._root)
            lock.release()
        return None

    def _new_seat(self, slot: Lock) -> _Seat:
        seat = _Seat(slot, self._new_child())
        self._seats.append(seat)
        self._selector.register(seat.child, selectors.EVENT_READ, seat)
        return seat

    def _new_child(self) -> CompilerChild:
        return CompilerChild(self._command)

    def _start(self, seat: _Seat, job: _Job) -> None:
        if seat.child.worn:
            self._replace_child(seat)
        seat.job = job
        seat.child.ask(job.item.specialization, job.item.key.target, job.directory)

    def _replace_child(self, seat: _Seat) -> None:
        self._selector.unregister(seat.child)
        seat.child.close()
        seat.child = self._new_child()
        self._selector.register(seat.child, selectors.EVENT_READ, seat)

    def _leave(self, seat: _Seat) -> None:
        self._selector.unregister(seat.child)
        self._seats.remove(seat)
        seat.child.close()
        seat.slot.release()
        if seat.job is not None:
            seat.job.close()

    def _take_answer(self, seat: _Seat) -> None:
        job, self._last_news = seat.job, time.monotonic()
        if job is None:  # an idle child died; its seat is filled or left on the next round
            self._leave(seat)
            return
        try:
            self._finish(job, seat.child.answer())
        except ChildDied as death:
            self._replace_child(seat)
            if death.killed and job.tries < TRIES:
                job.tries += 1
                seat.child.ask(job.item.specialization, job.item.key.target, job.directory)
                return
            self._fail(job, death.as_error(job.item.specialization.title()), remember=not death.killed)
        except JitsparkError as error:
            self._fail(job, error, remember=isinstance(error, CompileError))
        seat.job = None
        job.close()

    def _fail(self, job: _Job, error: JitsparkError, *, remember: bool) -> None:
        if remember and self._root is not None and isinstance(error, CompileError):
            remember_failure(self._root, job.item.key, self._toolchain, error)
        self._progress.settle_failed(job.item, error)

    def _finish(self, job: _Job, answer: Answer) -> None:
        content = _read_staged(job, answer)
        record = self._record(job.item, answer, content)
        self._progress.settle_compiled(job.item, self._keep(job, record, content), answer.seconds)

    def _record(self, item: Wanted, answer: Answer, content: bytes) -> Record:
        assert self._progress.lookup.toolchain is not None
        return Record.of(
            item.recipe, self._progress.lookup.toolchain, content, answer.signature, answer.needs, CUDA_FLAVOUR
        )

    def _keep(self, job: _Job, record: Record, content: bytes) -> Entry:
        """Publish the entry, or keep it in memory when the root cannot take it."""
        if self._root is not None:
            try:
                return publish(self._root, job.item.key, record, job.directory)
            except CacheDirectoryError as problem:
                if not self._progress.unpublished:
                    logger.warning("Compiled kernels stay in memory: %s", problem)
                self._progress.unpublished[job.item.key] = problem
        entry = Entry(None, job.item.key, record.toolchain_digest, record, content)
        self._progress.lookup.remember(entry)
        return entry

    def _report_waiting(self, free: Sequence[Wanted]) -> None:
        now = time.monotonic()
        if not free or now - self._last_report < REPORT_SECONDS:
            return
        self._last_report = now
        holder = self._locks.key(free[0].key.recipe).holder()
        self._progress.tell("waiting", free[0], now - self._last_news, holder)

    def _end_overdue(self) -> None:
        for seat in list(self._seats):
            if seat.job is not None and seat.child.overdue():
                error = ChildDied(-9, "no answer in time").as_error(seat.job.item.specialization.title())
                self._progress.settle_failed(seat.job.item, error)
                self._leave(seat)


def _read_staged(job: _Job, answer: Answer) -> bytes:
    """The artifact that the child says it wrote. An answer without a file is a failed compile."""
    try:
        content = (job.directory / ARTIFACT).read_bytes()
    except OSError:
        content = b""
    if not content or not answer.signature:
        raise CompileError(
            where=job.item.specialization.title(),
            found="an answer from the compiler, but no artifact",
            needed=ARTIFACT,
            remedy="Run `jitspark doctor`.",
        )
    return content


@contextmanager
def _work_directory(root: Path | None) -> Iterator[Path]:
    """Where a child writes: beside the store, so that publishing is a rename, or anywhere when there is no store."""
    if root is not None:
        try:
            with staging(root) as folder:
                yield folder
                return
        except CacheDirectoryError as problem:
            logger.info("%s", problem)
    with tempfile.TemporaryDirectory(prefix="jitspark-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary)


def _lock_directory(settings: Settings, root: Path | None, stack: ExitStack) -> LockDirectory:
    """The node's locks. Where none can be made, private ones: then work is done twice, with the same results."""
    try:
        return LockDirectory(settings.lock_dir, root, settings.compile_slots)
    except CacheDirectoryError as problem:
        logger.warning("Ranks cannot share the compiling: %s", problem)
        private = stack.enter_context(tempfile.TemporaryDirectory(prefix="jitspark-locks-"))
        return LockDirectory(Path(private), root, settings.compile_slots)
