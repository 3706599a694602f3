"""Memory that all ranks of a TP group map: made by all of them, or by none with the same reason everywhere.

Owns the difference between GPUs that cannot map each other's memory, where ranks can exchange another way, and a rank
that failed, which ends all of them. Torch only.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from jitspark.errors import DeviceMemoryError, RankError
from jitspark.peer_memory import peer_addresses, shareable, unmappable
from jitspark.runtime.device_memory import REMEDY
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.reasons import Kind, Reason, first_line, left_by

T = TypeVar("T")
MIB = 1 << 20
STEP = "memory for exchanges"
# For what ranks that have all just come to it do in milliseconds. Torch takes nothing else meanwhile, not even the word
# of a rank that failed: so whoever waits here in vain must be back before that rank's own patience ends.
MAP_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Mapped:
    """This rank's memory (uint8), and where each rank's begins for this one, in rank order."""

    memory: torch.Tensor
    addresses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Barred:
    """The first rank that cannot map the others' memory, and why: equal on all ranks."""

    rank: int
    reason: str


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """How memory is made, and mapped by the other ranks: as `jitspark.peer_memory` does, if not told otherwise."""

    make: Callable[[int, torch.device], torch.Tensor] = shareable
    addresses: Callable[[torch.Tensor, Any, float], tuple[int, ...]] = peer_addresses


def mapped_memory(num_bytes: int, group: RankGroup, device: torch.device, peer_memory: PeerMemory) -> Mapped | Barred:
    """`num_bytes` that all ranks map, or why they cannot. A collective call.

    Raises, on all ranks, where one fails otherwise: DeviceMemoryError on one without memory, RankError with its reason
    on the others, and on all of them for one that stays silent.
    """
    if group.size > 1 and device.type == "cuda" and (reason := unmappable(group.rank, group.gather, device)):
        return Barred(0, reason)
    memory = _on_all_ranks(lambda: peer_memory.make(num_bytes, device), group, num_bytes, device)
    if isinstance(memory, Barred):
        return memory
    patience = min(MAP_SECONDS, group.patience / 2)
    addresses = _on_all_ranks(lambda: peer_memory.addresses(memory, group.data, patience), group, num_bytes, device)
    return addresses if isinstance(addresses, Barred) else Mapped(memory, addresses)


def _on_all_ranks(work: Callable[[], T], group: RankGroup, num_bytes: int, device: torch.device) -> T | Barred:
    """What `work` makes, or the reason why a rank cannot map. Any other reason of a rank's ends all of them."""
    with group.telling(STEP):
        made, reason = _outcome(work, num_bytes, device)
    failed = group.failures(STEP, "", reason)
    if not failed:
        assert made is not None
        return made
    rank, barred = left_by(failed, (Kind.BARRED,), lambda *cause: _refusal(group, *cause), rank=group.rank)
    return Barred(rank, barred.text)


def _refusal(group: RankGroup, rank: int, reason: Reason) -> RankError:
    return RankError(
        where=f"rank {group.rank} of {group.size}, {STEP}",
        found=f"rank {rank} failed: {reason.text}",
        needed="every rank to succeed",
        remedy="Mend what that rank reports, and start all of them again.",
    )


def _outcome(work: Callable[[], T], num_bytes: int, device: torch.device) -> tuple[T | None, Reason | None]:
    """What `work` makes, or a reason that the ranks decide upon together. Raises whatever else ends this one."""
    try:
        return work(), None
    except RuntimeError as problem:
        found = first_line(problem)
        if _lacks_memory(problem):
            raise DeviceMemoryError(
                where=f"{STEP} on {device}",
                found=found,
                needed=f"{num_bytes / MIB:.1f} MiB on every rank",
                remedy=REMEDY,
            ) from problem
        if _waited_in_vain(problem):
            return None, Reason(Kind.PASSED_ON, f"waited in vain: {found}")
        if type(problem) is not RuntimeError:  # of a kind of its own: a launch that went wrong before, for instance
            raise
        return None, Reason(Kind.BARRED, found)


def _lacks_memory(problem: RuntimeError) -> bool:
    """The driver's calls fail without a class of their own."""
    return isinstance(problem, torch.OutOfMemoryError) or "out of memory" in str(problem)


def _waited_in_vain(problem: RuntimeError) -> bool:
    """Of the group's stores one has no class for it."""
    return isinstance(problem, dist.DistError) or "timeout" in str(problem).lower()
