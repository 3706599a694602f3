"""Parts of a start after which all ranks go on alike: each has what it needs, or all of them leave it to stock.

For what can still be given up once weights are loaded. A rank that dies or says nothing always ends all of them: nobody
knows what it does. So does a failure that no rank claims as its own, such as a connection that broke.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from jitspark.errors import JitsparkError, RankError
from jitspark.notice import say_once
from jitspark.runtime.ranks import RankGroup, first_line

T = TypeVar("T")
_PASSED_ON = "passed on: "


def attempted(work: Callable[[], T], ranks: RankGroup, step: str, what: str, *, may_give_up: bool) -> T | None:
    """What `work` makes on this rank; None, on all of them, where one cannot and `may_give_up`.

    `what` names, for the one warning, what stock then runs. Without `may_give_up` this is `work` alone, and raises what
    that raises. With it, ranks tell each other afterwards; raises RankError for one that stays silent, and this rank's
    own error where it is no JitsparkError and no lack of device memory.
    """
    if not may_give_up:
        return work()
    made, error = None, None
    try:
        made = work()
    except (JitsparkError, torch.OutOfMemoryError) as problem:
        error = problem
    except BaseException as problem:
        with contextlib.suppress(RankError):
            ranks.failures(step, "", f"{_PASSED_ON}{type(problem).__name__}: {problem}")  # all of them end
        raise
    failed = ranks.failures(step, "", None if error is None else _reason(error))
    if not failed:
        return made
    own = {rank: reason for rank, reason in failed.items() if not reason.startswith(_PASSED_ON)}
    if not own:
        raise _claimed_by_nobody(step, failed) if error is None else error
    rank, reason = next(iter(own.items()))
    say_once(f"Muse Spark runs vLLM's own {what} (on_error): rank {rank}: {reason}")
    return None


def _claimed_by_nobody(step: str, failed: Mapping[int, str]) -> RankError:
    return RankError(
        where=step,
        found=f"{len(failed)} ranks that could not go on: {next(iter(failed.values()))}",
        needed="every rank to be alive and at this step",
        remedy="Look at the ranks' logs, and start all of them again.",
    )


def _reason(error: BaseException) -> str:
    """A RankError tells of another rank, which says itself what its own reason is."""
    return f"{_PASSED_ON}{first_line(error)}" if isinstance(error, RankError) else first_line(error)
