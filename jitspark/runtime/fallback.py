"""Parts of a start after which all ranks go on alike: each has what it needs, or all of them leave it to stock.

For what can still be given up once weights are loaded. A rank that dies or says nothing always ends all of them: nobody
knows what it does. So do an error of no known kind, and a failure that no rank claims as its own, such as a connection
that broke.
"""

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch

from jitspark.errors import JitsparkError, RankError
from jitspark.notice import say_once
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.reasons import Kind, Reason, left_by, reason_of

T = TypeVar("T")


def attempted(work: Callable[[], T], ranks: RankGroup, step: str, what: str, *, may_give_up: bool) -> T | None:
    """What `work` makes on this rank; None, on all of them, where one cannot and `may_give_up`.

    `what` names, for the one warning, what stock then runs. Without `may_give_up` this is `work` alone, and raises what
    that raises. With it, ranks tell each other afterwards; raises RankError for one that stays silent or ends, and this
    rank's own error where it is no JitsparkError and no lack of device memory.
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
            ranks.failures(step, "", reason_of(problem))  # all of them end
        raise
    failed = ranks.failures(step, "", None if error is None else reason_of(error))
    if not failed:
        return made
    rank, reason = left_by(
        failed, (Kind.OWN,), lambda rank, reason: _refusal(step, rank, reason), rank=ranks.rank, error=error
    )
    say_once(f"Muse Spark runs vLLM's own {what} (on_error): rank {rank}: {reason}")
    return None


def _refusal(step: str, rank: int, reason: Reason) -> RankError:
    return RankError(
        where=step,
        found=f"rank {rank} could not go on: {reason}",
        needed="every rank to be alive and at this step",
        remedy="Look at the ranks' logs, and start all of them again.",
    )
