"""The ranks of a TP group at work together: a part is done by all of them, or ends on all with the reason. Torch only.

Owns waiting in bounded time. A rank that fails says so before it leaves, one that dies closes its connections, and one
that says nothing is waited for `patience` seconds: the others then end with a RankError that names it. Parts do not
nest: a failure would be told again where nobody hears it, since the others have left. Words travel
between CPUs (gloo), one message to each other rank, so that everybody knows who is silent; tensors travel on the
device's own group. Nothing is pickled.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from jitspark.errors import RankError
from jitspark.runtime.reasons import WORD_BYTES, Kind, Reason, Word, first_line, reason_of

PATIENCE = 120.0
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
_PART: ContextVar[str] = ContextVar("_PART", default="")  # the one that this rank is in
_TAG = 7301  # of words, so that no other message between the same ranks is taken for one


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks that share a layer, as one of them sees it.

    control: a gloo group. data: the group of the device that tensors are on; the same one on a CPU. Both None for a
    rank alone. patience: seconds that another rank is waited for.
    """

    rank: int
    size: int
    control: Any = None
    data: Any = None
    patience: float = PATIENCE

    @classmethod
    def of_coordinator(cls, coordinator: Any, patience: float = PATIENCE) -> "RankGroup":
        """The group behind vLLM's `get_tp_group()`."""
        return cls(
            rank=coordinator.rank_in_group,
            size=coordinator.world_size,
            control=coordinator.cpu_group,
            data=coordinator.device_group,
            patience=patience,
        )

    @contextlib.contextmanager
    def together(self, step: str, digest: str = "") -> Iterator[None]:
        """A part of the work that counts only when every rank has done it.

        Whatever ends it on one rank is told to the others, where it is a RankError with that rank's reason. So are
        another rank's `step` or `digest` (of what must be equal on all), its death, and its silence.
        """
        _require_no_part(step)
        try:
            with _within(step):
                yield
        except RankError:
            raise  # the others have left already
        except BaseException as error:
            with contextlib.suppress(RankError):
                self._words(step, digest, reason_of(error))
            raise
        _refuse_failures(step, self._words(step, digest, None))

    @contextlib.contextmanager
    def telling(self, step: str) -> Iterator[None]:
        """Work of this rank between two parts: its failure is told where the others wait for the next part."""
        _require_no_part(step)
        try:
            with _within(step):
                yield
        except RankError:
            raise
        except BaseException as error:
            with contextlib.suppress(RankError):
                self._words(step, "", reason_of(error))
            raise

    def listen(self) -> "Listening":
        """Hear the others' next words while this rank still works on its part. To be given to `failures` then."""
        return Listening(self)

    def failures(
        self, step: str, digest: str, reason: Reason | None, listening: "Listening | None" = None
    ) -> dict[int, Reason]:
        """Why ranks cannot go on from here, by rank: equal on all of them, so they can decide alike (`left_by`).

        A rank with another step or digest than rank 0's is among them. Raises RankError for silence: nobody knows then
        what the others do.
        """
        _require_no_part(step)
        words = self._words(step, digest, reason, listening)
        first = (words[0].step, words[0].digest)
        unlike = {
            rank: Reason(Kind.OWN, f"{word.step} {word.digest}, where rank 0 has {first[0]} {first[1]}")
            for rank, word in enumerate(words)
            if (word.step, word.digest) != first
        }
        return _reasons(words) or unlike

    def swap(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """All to all in equal parts: row d of `sent` goes to rank d, row s of `received` comes from rank s. uint8.

        The one place where ranks exchange experts: a backend without this call would be served here. NCCL has it, and
        so has the gloo of torch 2.11 and 2.13. Raises RankError, after `patience` at the latest.
        """
        self._collective("an exchange", dist.all_to_all_single, received, sent)

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor of the same shape, in rank order: [size, ...]. Raises RankError, as `swap`."""
        if self.size == 1:
            return own[None]
        every = [torch.empty_like(own) for _ in range(self.size)]
        self._collective("a gather", dist.all_gather, every, own)
        return torch.stack(every)

    def gather_in_stream(self, own: torch.Tensor) -> torch.Tensor:
        """As `gather`, in the order of the current stream: nothing here waits for a GPU, so that it can be captured.

        What bounds the wait for another rank is then the backend alone; a captured one waits without an end.
        """
        every = own.new_empty((self.size, *own.shape))
        try:
            _ALL_GATHER(every.flatten(), own.flatten(), group=self.data)
        except RuntimeError as error:
            raise self._error("a gather", first_line(error), "all ranks to take part until its end") from error
        return every

    def _collective(self, what: str, function: Any, *tensors: Any) -> None:
        try:
            work = function(*tensors, group=self.data, async_op=True)
            work.wait(timedelta(seconds=self.patience))
        except RuntimeError as error:  # torch's, for a connection that ended and for a time that is over
            raise self._error(
                what, f"that it ended: {first_line(error)}", "all ranks to take part until its end"
            ) from error

    def _words(self, step: str, digest: str, reason: Reason | None, listening: "Listening | None" = None) -> list[Word]:
        """What every rank says about this step, in rank order. Raises RankError for ranks that say nothing."""
        own = Word.of(step, digest, reason)
        if self.size == 1:
            return [own]
        deadline = time.monotonic() + self.patience
        message = torch.frombuffer(bytearray(own.encoded()), dtype=torch.uint8)
        peers = [rank for rank in range(self.size) if rank != self.rank]
        silent: dict[int, str] = {}
        heard = {rank: torch.empty_like(message) for rank in peers} if listening is None else {}
        works = [(rank, self._started(silent, rank, dist.isend, message, group_dst=rank)) for rank in peers]
        works += [(rank, self._started(silent, rank, dist.irecv, heard[rank], group_src=rank)) for rank in heard]
        for rank, work in works:
            if work is not None and rank not in silent:
                self._waited(silent, rank, work, deadline)
        words = {rank: Word.decoded(bytes(each.tolist())) for rank, each in heard.items() if rank not in silent}
        if listening is not None:
            words = listening.words(deadline, silent)
        if silent:
            raise self._error(step, f"no word from {_listed(silent)}", "every rank to be alive and at this step")
        return [words.get(rank, own) for rank in range(self.size)]

    def _started(self, silent: dict[int, str], rank: int, function: Any, message: torch.Tensor, **peer: int) -> Any:
        try:
            return function(message, group=self.control, tag=_TAG, **peer)
        except RuntimeError as error:
            silent[rank] = first_line(error)
            return None

    def _waited(self, silent: dict[int, str], rank: int, work: Any, deadline: float) -> None:
        try:
            work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError as error:
            silent[rank] = first_line(error)

    def _error(self, step: str, found: str, needed: str) -> RankError:
        return RankError(
            where=f"rank {self.rank} of {self.size}, {step}",
            found=found,
            needed=needed,
            remedy="Look at that rank's own log, and start all of them again.",
        )


class Listening:
    """The next word of each other rank, waited for beside this rank's work. A thread each: asking gloo is waiting."""

    def __init__(self, group: RankGroup) -> None:
        self._words: dict[int, Word] = {}
        self._silent: dict[int, str] = {}
        self._threads = {
            rank: threading.Thread(target=self._hear, args=(group, rank), daemon=True)
            for rank in range(group.size)
            if rank != group.rank
        }
        for thread in self._threads.values():
            thread.start()

    def failure(self) -> tuple[int, Reason] | None:
        """A rank that has already said that it cannot go on, or has gone, and why; None as long as there is none."""
        said = {rank: word.reason for rank, word in self._words.copy().items() if word.reason is not None}
        gone = {rank: Reason(Kind.PASSED_ON, text) for rank, text in self._silent.copy().items()}
        return next(iter({**said, **gone}.items()), None)

    def words(self, deadline: float, silent: dict[int, str]) -> dict[int, Word]:
        """All words that came until `deadline`, by rank; the other ranks are added to `silent`."""
        for rank, thread in self._threads.items():
            thread.join(max(0.001, deadline - time.monotonic()))
            if rank not in self._words:
                silent.setdefault(rank, self._silent.get(rank, "it said nothing in time"))
        return self._words

    def _hear(self, group: RankGroup, rank: int) -> None:
        buffer = torch.empty(WORD_BYTES, dtype=torch.uint8)
        try:
            work = dist.irecv(buffer, group=group.control, group_src=rank, tag=_TAG)
            work.wait(timedelta(seconds=group.patience))
        except RuntimeError as error:
            self._silent[rank] = first_line(error)
        else:
            self._words[rank] = Word.decoded(bytes(buffer.tolist()))


def _require_no_part(step: str) -> None:
    assert not _PART.get(), f"{step} within {_PART.get()}"


@contextlib.contextmanager
def _within(step: str) -> Iterator[None]:
    before = _PART.set(step)
    try:
        yield
    finally:
        _PART.reset(before)


def _refuse_failures(step: str, words: Sequence[Word]) -> None:
    failed = _reasons(words)
    if failed:
        rank, reason = next(iter(failed.items()))
        raise _disagreement(step, f"rank {rank} failed: {reason.text}", "every rank to succeed")
    for what in ("step", "digest"):
        said = {getattr(word, what): rank for rank, word in reversed(list(enumerate(words)))}
        if len(said) > 1:
            listed = ", ".join(
                f"{text!r} on rank {rank}" for text, rank in sorted(said.items(), key=lambda item: item[1])
            )
            raise _disagreement(step, f"unlike {what}s: {listed}", f"the same {what} on all ranks")


def _reasons(words: Sequence[Word]) -> dict[int, Reason]:
    return {rank: word.reason for rank, word in enumerate(words) if word.reason is not None}


def _disagreement(step: str, found: str, needed: str) -> RankError:
    remedy = "Mend what that rank reports, give all ranks the same model and options, and start them again."
    return RankError(where=step, found=found, needed=needed, remedy=remedy)


def _listed(silent: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} ({reason})" for rank, reason in sorted(silent.items()))
