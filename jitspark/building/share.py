"""One process' share of the compiling: each key is compiled once per node, whoever does it.

Whoever holds a compile slot takes the keys that nobody else holds; the others watch for entries to appear, and take
over as soon as a holder dies, since the operating system frees its locks. Nobody waits for a key whose entry exists.
"""

import logging
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack

from jitspark.building.compiler_child import COMPILE_LIMIT_SECONDS, Answer, ChildDied
from jitspark.building.progress import Progress, Wanted
from jitspark.building.seats import Job, Seat, Seats
from jitspark.building.workplace import Workplace, workplace
from jitspark.cache.failures import clean_log, forget_failure, remember_failure, remembered_failure
from jitspark.cache.lock import POLL_SECONDS, Holder, Lock
from jitspark.cache.record import Record, record_from_bytes
from jitspark.cache.store import Entry, put
from jitspark.errors import CacheDirectoryError, CompileError, EntryError, JitsparkError
from jitspark.key import Key
from jitspark.settings import Settings
from jitspark.target import CUDA_FLAVOUR

logger = logging.getLogger("jitspark")

REPORT_SECONDS = 2.0
TRIES = 2
# A holder that is alive but stopped frees no lock. Nothing compiles this long, so then we do the work ourselves.
PATIENCE_SECONDS = COMPILE_LIMIT_SECONDS + 60.0


def compile_missing(
    missing: Sequence[Wanted],
    progress: Progress,
    settings: Settings,
    *,
    jobs: int,
    retry: bool,
    must_publish: bool,
    command: tuple[str, ...],
) -> None:
    """Return when every item of `missing` is settled, by this process or by another.

    Raises CacheDirectoryError without a place for temporary files, or when `must_publish` and an entry cannot be
    published; ToolchainError when no child can be started.
    """
    with workplace(settings, progress.lookup.roots.writable_layer) as place:
        share = _Share(missing, progress, place, jobs, command, must_publish=must_publish)
        try:
            if retry:
                share.forget_failures()
            share.run()
        finally:
            share.end()


class _Share:
    def __init__(
        self,
        missing: Sequence[Wanted],
        progress: Progress,
        place: Workplace,
        jobs: int,
        command: tuple[str, ...],
        *,
        must_publish: bool,
    ) -> None:
        # Every process starts elsewhere in the list, so that they seldom ask for the same lock.
        start = os.getpid() % len(missing)
        self._missing = [*missing[start:], *missing[:start]]
        self._progress = progress
        self._layer = progress.lookup.roots.writable_layer
        self._toolchain = progress.lookup.own or ""
        self._place = place
        self._jobs = jobs
        self._must_publish = must_publish
        self._seats = Seats(command, place.folder)
        self._publishing: set[Key] = set()
        self._last_report = self._last_news = time.monotonic()

    def run(self) -> None:
        while self._progress.unsettled(self._missing):
            free = self._free()
            self._fill_seats(free)
            self._report(free)
            for seat in self._seats.answered(POLL_SECONDS):
                self._take_answer(seat)
            self._end_overdue()

    def forget_failures(self) -> None:
        if self._layer is not None:
            for item in self._missing:
                forget_failure(self._layer, item.key, self._toolchain)

    def end(self) -> None:
        self._seats.end()

    def _free(self) -> list[Wanted]:
        """What is not settled and not in our hands."""
        held = {job.item.key for _, job in self._seats.working()} | self._publishing
        open_items = self._progress.unsettled(self._missing)
        return [item for item in open_items if item.key not in held and not self._settle(item)]

    def _settle(self, item: Wanted) -> bool:
        """Settle `item` if another process compiled it, or failed to."""
        if self._progress.settle_if_found(item):
            self._last_news = time.monotonic()
            return True
        failure = remembered_failure(self._layer, item.key, self._toolchain) if self._layer else None
        if failure is not None:
            self._progress.settle_failed(item, failure)
        return failure is not None

    def _fill_seats(self, free: list[Wanted]) -> None:
        for seat in self._seats.idle():
            job = self._next_job(free)
            if job is None:
                self._seats.leave(seat)
            else:
                self._seats.start(seat, job)
        while free and len(self._seats) < self._jobs and (slot := self._slot()) is not None:
            with ExitStack() as undo:
                undo.callback(slot.release)
                job = self._next_job(free)
                if job is None:
                    return
                undo.callback(job.close)
                self._seats.add(slot, job)
                undo.pop_all()

    def _slot(self) -> Lock | None:
        locks = self._place.locks
        slot = locks.try_slot("compiling")
        if slot is None and self._impatient() and any(map(_hangs, locks.slot_holders())):
            return locks.slot(0)  # not ours; others that work through long lists are waited for
        return slot

    def _next_job(self, free: list[Wanted]) -> Job | None:
        """The first free key that nobody holds, locked; `free` loses what is taken or settled."""
        for item in list(free):
            lock = self._place.locks.key(item.key.recipe)
            if not lock.try_acquire(item.specialization.title()) and not self._impatient():
                continue
            free.remove(item)
            # Its holder may have published between our look and our lock.
            if not self._settle(item):
                return self._job(item, lock)
            lock.release()
        return None

    def _job(self, item: Wanted, lock: Lock) -> Job:
        try:
            return Job(item, lock, self._place.folder)
        except OSError as problem:
            lock.release()
            raise CacheDirectoryError(
                where=f"temporary directory {self._place.folder}",
                found=problem.strerror or str(problem),
                needed="space for a compiler's temporary files",
                remedy="Free space, or set TMPDIR to another directory.",
            ) from problem

    def _impatient(self) -> bool:
        return time.monotonic() - self._last_news > PATIENCE_SECONDS

    def _take_answer(self, seat: Seat) -> None:
        job = seat.job
        if job is None:  # an idle child died; its seat is filled or left on the next round
            self._seats.leave(seat)
            return
        try:
            answer = seat.child.answer()
            if answer is None:
                return
            content = job.artifact()
            record = self._record(job, answer, content)
        except ChildDied as death:
            self._seats.replace_child(seat)
            if death.killed and job.tries < TRIES:
                job.tries += 1
                seat.ask()
                return
            self._fail(job, death.as_error(job.item.specialization.title()), remember=not death.killed)
        except JitsparkError as error:
            self._fail(job, error, remember=True)
        else:
            seat.job = None
            self._finish(job, record, content, answer.seconds)
            return
        seat.job = None
        job.close()

    def _fail(self, job: Job, error: JitsparkError, *, remember: bool) -> None:
        """Settle the job as failed; what only this process or this moment can fail of is not remembered."""
        self._last_news = time.monotonic()
        if isinstance(error, CompileError):
            error.log = clean_log(error.log)
            if remember and self._layer is not None and not self._place.is_full():
                remember_failure(self._layer, job.item.key, self._toolchain, error)
        self._progress.settle_failed(job.item, error)

    def _record(self, job: Job, answer: Answer, content: bytes) -> Record:
        """The artifact's record, as every reader will take it: what they would refuse is a failed compile."""
        toolchain, item = self._progress.lookup.toolchain, job.item
        assert toolchain is not None
        record = Record.of(item.recipe, toolchain, content, answer.signature, answer.needs, CUDA_FLAVOUR)
        try:
            return record_from_bytes(record.to_bytes(), item.specialization.title(), item.key, self._toolchain)
        except EntryError as problem:
            raise CompileError(**problem.fields()) from None

    def _finish(self, job: Job, record: Record, content: bytes, seconds: float) -> None:
        self._last_news = time.monotonic()
        self._publishing.add(job.item.key)
        try:
            self._fill_seats(self._free())  # the child goes on while this entry is forced to disk
            self._progress.settle_compiled(job.item, self._keep(job, record, content), seconds)
        finally:
            self._publishing.discard(job.item.key)
            job.close()

    def _keep(self, job: Job, record: Record, content: bytes) -> Entry:
        """Publish the entry, or keep it in memory when the root cannot take it."""
        if self._layer is not None:
            try:
                return put(self._layer, job.item.key, record, content)
            except CacheDirectoryError as problem:
                if self._must_publish:
                    raise
                if not self._progress.unpublished:
                    logger.warning("Compiled kernels stay in memory: %s", problem)
                self._progress.unpublished[job.item.key] = problem
        entry = Entry(None, job.item.key, record.toolchain_digest, record, content)
        self._progress.lookup.remember(entry)
        return entry

    def _report(self, free: Sequence[Wanted]) -> None:
        """Tell what is compiled here and what is waited for, often enough that nobody takes us for dead."""
        now = time.monotonic()
        if now - self._last_report < REPORT_SECONDS:
            return
        self._last_report = now
        for seat, job in self._seats.working():
            self._progress.tell("compiling", job.item, now - seat.child.asked_at)
        if free:
            self._progress.tell("waiting", free[0], now - self._last_news, self._holder(free[0]))

    def _holder(self, item: Wanted) -> Holder | None:
        """Who compiles `item`; while nobody does, who holds the slots that we would do it in."""
        locks = self._place.locks
        return next(filter(None, (locks.key(item.key.recipe).holder(), *locks.slot_holders())), None)

    def _end_overdue(self) -> None:
        for seat, job in self._seats.working():
            if seat.child.overdue():
                title = job.item.specialization.title()
                death = ChildDied(-9, f"no answer within {COMPILE_LIMIT_SECONDS:.0f} seconds")
                self._fail(job, death.as_error(title), remember=True)
                self._seats.leave(seat)


def _hangs(holder: Holder) -> bool:
    """Whether a slot's holder is stopped, or has begun no compile for longer than any takes."""
    return holder.is_stuck() or time.time() - holder.since > PATIENCE_SECONDS
