"""Why a rank cannot go on, as ranks tell each other: a text for people, and a kind that all of them decide by alike.

Owns the word that carries it, and who raises what then. Nothing is told from how a text begins.
"""

import enum
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from jitspark.errors import JitsparkError, RankError

# A word's size: long enough for a reason, and far below what a connection takes without being read.
WORD_BYTES = 2048
MAX_DIGEST = 800  # characters of JSON


class Kind(enum.StrEnum):
    """In the order in which they decide: the first kind that some rank has is the one that counts."""

    UNFORESEEN = "unforeseen"  # an error of no known kind, after which its rank ends
    OWN = "own"  # what went wrong on this rank
    BARRED = "barred"  # nothing went wrong: this rank cannot go this way, and there is another one
    PASSED_ON = "passed_on"  # what this rank only heard of, or waited for in vain: another one is the cause


@dataclass(frozen=True, slots=True)
class Reason:
    """Why one rank cannot go on."""

    kind: Kind
    text: str

    def __str__(self) -> str:
        return f"an error of no known kind, {self.text}" if self.kind is Kind.UNFORESEEN else self.text


@dataclass(frozen=True, slots=True)
class Word:
    """What a rank says at a step: that it is through, or why not. Digests are compared, and shown where they differ."""

    step: str
    digest: str
    reason: Reason | None

    @classmethod
    def of(cls, step: str, digest: str, reason: Reason | None) -> "Word":
        """A digest too long for a word is told by its own."""
        fits = len(json.dumps(digest)) <= MAX_DIGEST
        return cls(step, digest if fits else hashlib.sha256(digest.encode()).hexdigest()[:16], reason)

    def encoded(self) -> bytes:
        """JSON in WORD_BYTES; a reason too long for that loses its end."""
        kind, said = (None, "") if self.reason is None else (self.reason.kind.value, self.reason.text)
        text = json.dumps([self.step, self.digest, kind, said])
        while len(text) > WORD_BYTES:
            said = said[: len(said) - (len(text) - WORD_BYTES) // 6 - 8] + " ..."
            text = json.dumps([self.step, self.digest, kind, said])
        return text.encode("ascii").ljust(WORD_BYTES)

    @classmethod
    def decoded(cls, message: bytes) -> "Word":
        step, digest, kind, said = json.loads(message)
        return cls(step, digest, None if kind is None else Reason(Kind(kind), said))


def reason_of(error: BaseException) -> Reason:
    """What a rank that `error` ends tells the others. A RankError tells of another rank, which says itself why."""
    if isinstance(error, JitsparkError):
        return Reason(Kind.PASSED_ON if isinstance(error, RankError) else Kind.OWN, str(error))
    kind = Kind.OWN if isinstance(error, torch.OutOfMemoryError) else Kind.UNFORESEEN
    return Reason(kind, f"{type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """What it says, in a line; its class where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def left_by(
    failed: Mapping[int, Reason],
    leaves: Collection[Kind],
    refusal: Callable[[int, Reason], RankError],
    *,
    rank: int,
    error: BaseException | None = None,
) -> tuple[int, Reason]:
    """The rank and the reason for which all ranks go another way, as reasons of a kind in `leaves` let them.

    failed: all reasons, by rank, the same on all of them. rank, error: this one, and what ended its own part. For a
    reason of another kind this raises: on the rank that it comes from its own error, on one that was told of a failure
    the RankError that it has from there, and on the others `refusal` of the reason.
    """
    kinds = list(Kind)
    first, reason = min(failed.items(), key=lambda item: (kinds.index(item[1].kind), item[0]))
    if reason.kind in leaves:
        return first, reason
    if error is not None and (rank == first or isinstance(error, RankError)):
        raise error
    raise refusal(first, reason)
