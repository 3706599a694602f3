"""Places for the buffers of a plan's arenas: lifetimes, and offsets such that what lives at one time does not overlap.

With programmatic dependent launch a kernel may begin before the one before it has ended, but it writes only after its
wait, when every launch before is complete. So a place may be taken over in the launch after its last use. What is read
before the wait is alive through the launch before, like everything that is read later.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from jitspark.plans.plan import READS, Launch

ALIGNMENT = 256  # bytes; a cache line pair, and what tensor copies ask for

Interval = tuple[int, int]  # first and last launch, both included


@dataclass(frozen=True, slots=True)
class Tenant:
    """A buffer to be placed: its size in bytes, and when what it holds is needed, in ascending order."""

    name: str
    size: int
    intervals: tuple[Interval, ...]

    def meets(self, other: "Tenant") -> bool:
        """Whether both are alive in some launch."""
        return meet(self.intervals, other.intervals)


def meet(one: Sequence[Interval], other: Sequence[Interval]) -> bool:
    """Whether any two of these intervals, each ascending, have a launch in common."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][1] < other[j][0]:
            i += 1
        elif other[j][1] < one[i][0]:
            j += 1
        else:
            return True
    return False


def intervals(launches: Sequence[Launch]) -> dict[str, tuple[Interval, ...]]:
    """When each buffer is alive: from a write to the last read before the next fresh one.

    A write is fresh if the launch reads nothing of the buffer, and somebody has read what was written before. What is
    read before it was ever written is alive from the first launch on.
    """
    found: dict[str, list[list[int]]] = {}
    unread: set[str] = set()
    for index, launch in enumerate(launches):
        for argument in launch.tensors():
            name = argument.buffer
            spans = found.setdefault(name, [])
            if argument.role in READS:
                unread.discard(name)
            elif name not in unread:
                spans.append([index, index])
                unread.add(name)
            if spans:
                spans[-1][1] = index
            else:
                spans.append([0, index])
    return {name: tuple([(start, end) for start, end in spans]) for name, spans in found.items()}


def place(tenants: Iterable[Tenant]) -> tuple[Mapping[str, int], int]:
    """An offset in bytes for each tenant, and the size of the arena. Large ones first, each as low as it fits."""
    placed: list[tuple[int, Tenant]] = []
    for tenant in sorted(tenants, key=lambda each: (-each.size, each.name)):
        neighbours = sorted((offset, other.size) for offset, other in placed if tenant.meets(other))
        placed.append((_lowest(tenant.size, neighbours), tenant))
    return {tenant.name: offset for offset, tenant in placed}, max((o + aligned(t.size) for o, t in placed), default=0)


def _lowest(size: int, taken: Iterable[tuple[int, int]]) -> int:
    """The lowest offset with `size` free bytes; `taken` are (offset, size), by offset."""
    start = 0
    for offset, length in taken:
        if start + size <= offset:
            break
        start = max(start, offset + aligned(length))
    return start


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
