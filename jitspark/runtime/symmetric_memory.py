"""Memory that all ranks of a TP group map: one allocation for all plans' exchanges, each with a region of its own.

Owns the regions, the check before the first exchange that all ranks have the same plans, whether they exchange through
this memory or over torch.distributed, and which word a plan tells of a silent rank in. Refuses other world sizes than
the plans', ranks with other plans, and GPUs that cannot map each other's memory where they must. Torch only.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from jitspark.errors import GeometryError, RankError, UsageError
from jitspark.notice import say_once
from jitspark.plans.binding import SymmetricMemory
from jitspark.plans.format import to_bytes
from jitspark.plans.plan import Kind, Plan
from jitspark.runtime.device_memory import wait_for
from jitspark.runtime.mapped_memory import STEP, Barred, Mapped, PeerMemory, mapped_memory
from jitspark.runtime.options import AUTO_EXCHANGES, SYMMETRIC_MEMORY, TORCH_DISTRIBUTED
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.silence import WordWatch

# How long a kernel waits for another rank. Ranks drift apart by what their hosts do between steps, seldom by seconds.
TIMEOUT_US = 20_000_000
FAILURE = "failure"  # the argument of an exchange that holds the word
REGION_ALIGN = 4096

Gather = Callable[[torch.Tensor], torch.Tensor]  # this rank's tensor -> every rank's, [world, ...] in rank order


@dataclass(frozen=True, slots=True)
class ExchangeMemory:
    """Every plan's region, by the plan's digest, and what its launches must be bound with.

    Regions are never shared: another plan has another layout, and another count of launches. gather: over
    torch.distributed, where that is what brings the other ranks' packets into this rank's region
    (`distributed_exchanges`); None where all ranks map the regions.
    """

    rank: int
    size: int
    regions: Mapping[str, SymmetricMemory]
    timeout_us: int = TIMEOUT_US
    gather: Gather | None = None

    def of(self, plan: Plan) -> SymmetricMemory:
        return self.regions[digest_of(plan)]

    @property
    def numbers(self) -> dict[str, int]:
        """The scalars that a plan leaves open for exchanges."""
        return {"rank": self.rank, "timeout_us": self.timeout_us}


def exchange_memory(
    plans: Sequence[Plan],
    group: RankGroup,
    device: torch.device | str,
    tp_sizes: Sequence[int],
    *,
    exchanges: str = SYMMETRIC_MEMORY,
    timeout_us: int = TIMEOUT_US,
    peer_memory: PeerMemory | None = None,
) -> ExchangeMemory:
    """Regions for `plans`, mapped by all ranks of `group`, zero; a collective call, which returns on all or on none.

    tp_sizes: those that the geometry allows. exchanges: the option of that name; "auto" warns once, on all ranks, where
    one cannot map, and takes torch.distributed; any other failure of a rank ends all of them. Raises GeometryError for
    a world of another size; DeviceMemoryError, or torch's own error, on a rank without memory; and on all ranks
    UsageError for GPUs that cannot map each other's memory and are told to, RankError for unequal plans and with
    another rank's reason.
    """
    device = torch.empty(0, device=device).device
    digests = [digest_of(plan) for plan in plans]
    with group.together(STEP, hashlib.sha256("".join([*digests, exchanges]).encode()).hexdigest()[:16]):
        _require_size(plans, group, tp_sizes)
    ends = list(accumulate(-(-plan.symmetric_bytes // REGION_ALIGN) * REGION_ALIGN for plan in plans))
    total = max(ends[-1] if ends else 0, REGION_ALIGN)
    mapped = None
    if group.size == 1 or exchanges != TORCH_DISTRIBUTED:
        way = peer_memory or (PeerMemory(_zeros, _own_address) if group.size == 1 else PeerMemory())
        mapped = _unless_barred(mapped_memory(total, group, device, way), group, exchanges)
    memory, addresses = _unmapped(total, group, device) if mapped is None else (mapped.memory, mapped.addresses)
    with group.together("empty inboxes"):  # nobody sends before all of them are
        memory.zero_()
        wait_for(device)
    if mapped is None:
        with group.together("the first gather"):
            group.gather(memory[:1])  # whose waiting is bounded, unlike that of the next one
            group.gather_in_stream(memory[:1])  # makes the connections, which no capture could
            wait_for(device)
    regions = {
        digest: SymmetricMemory(memory[start:end], tuple(address + start for address in addresses))
        for digest, start, end in zip(digests, [0, *ends], ends, strict=False)
    }
    gather = group.gather_in_stream if mapped is None else None
    return ExchangeMemory(group.rank, group.size, regions, timeout_us, gather)


def simulated_world(num_bytes: int, size: int, device: torch.device | str) -> tuple[SymmetricMemory, ...]:
    """The memory of `size` ranks that one process plays on one device."""
    every = [_zeros(num_bytes, torch.device(device)) for _ in range(size)]
    addresses = tuple(memory.data_ptr() for memory in every)
    return tuple(SymmetricMemory(memory, addresses) for memory in every)


class SilentRankWatch:
    """The watch on the words in which exchanges tell of a silent rank, by plan: `note(plan)` behind each run of it."""

    def __init__(self, plans: Sequence[Plan], memory: ExchangeMemory) -> None:
        # of these very objects, since a digest takes longer than a step has; they are kept, so their ids are too
        self._plans = {id(plan): (digest_of(plan), plan) for plan in plans}
        found = {digest_of(plan): _word(plan, memory.of(plan)) for plan in plans}
        words = {digest: word for digest, word in found.items() if word is not None}
        self._watch = WordWatch(words, partial(_silent, memory.rank, memory.size))

    def note(self, plan: Plan) -> None:
        """Copy the plan's word to the host, on the current stream."""
        known = self._plans.get(id(plan))
        self._watch.note(digest_of(plan) if known is None else known[0])

    def require_heard(self) -> None:
        """Raise RankError that names the rank, once a kernel has waited for one in vain."""
        self._watch.require_heard()


def _silent(rank: int, size: int, word: int) -> RankError:
    return RankError(
        where=f"rank {rank} of {size}, an exchange",
        found=f"nothing from rank {word - 1} in time",
        needed="every rank to run the same step",
        remedy="Look at that rank's own log, and start all of them again.",
    )


def digest_of(plan: Plan) -> str:
    return hashlib.sha256(to_bytes(plan)).hexdigest()


def _word(plan: Plan, memory: SymmetricMemory) -> torch.Tensor | None:
    """The plan's failure word; None for a plan without exchanges."""
    signals = (each for each in plan.buffers if each.kind is Kind.SIGNAL and each.shape == (1,))
    buffer = next((each for each in signals if each.name.endswith(FAILURE)), None)
    return None if buffer is None else memory.local[buffer.offset : buffer.offset + 4].view(torch.int32)


def _unless_barred(found: Mapped | Barred, group: RankGroup, exchanges: str) -> Mapped | None:
    """None, on all ranks, where one cannot map and `exchanges` leaves the choice."""
    if isinstance(found, Mapped):
        return found
    if exchanges == AUTO_EXCHANGES:
        say_once(
            f"The ranks exchange over torch.distributed, which takes longer, and vLLM samples the draft's tokens: rank "
            f"{found.rank} cannot map the others' memory: {found.reason}"
        )
        return None
    raise UsageError(  # no rank has failed: where stock may run instead, it does
        where=f"rank {group.rank} of {group.size}, {STEP} (exchanges {exchanges})",
        found=f"on rank {found.rank}: {found.reason}",
        needed="GPUs that map each other's memory, over NVLink or PCIe",
        remedy='Use such GPUs, leave the exchanges to torch.distributed (exchanges "auto"), or run vLLM\'s own decode.',
    )


def _zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def _own_address(memory: torch.Tensor, *_: object) -> tuple[int, ...]:
    """Of a rank alone."""
    return (memory.data_ptr(),)


def _unmapped(num_bytes: int, group: RankGroup, device: torch.device) -> tuple[torch.Tensor, tuple[int, ...]]:
    """This rank's own memory, and behind it memory that nobody reads, in the place of every other rank's."""
    with group.together(STEP):  # a gather follows, in which a rank without memory would be waited for without an end
        memory = _zeros(2 * num_bytes, device)
    addresses = [memory.data_ptr() + num_bytes] * group.size
    addresses[group.rank] = memory.data_ptr()
    return memory, tuple(addresses)


def _require_size(plans: Sequence[Plan], group: RankGroup, tp_sizes: Sequence[int]) -> None:
    unlike = sorted({plan.tp for plan in plans} - {group.size})
    if group.size not in tp_sizes or unlike:
        raise GeometryError(
            where=STEP,
            found=f"{group.size} ranks, plans for TP {', '.join(map(str, unlike or [group.size]))}",
            needed=f"as many ranks as the plans are for, one of {', '.join(map(str, tp_sizes))}",
            remedy="Run a TP size that the geometry allows.",
        )
