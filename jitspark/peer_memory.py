"""Memory of one GPU that the others of a group map, over NVLink or PCIe: torch's symmetric memory, without multicast.

Imports torch where it is used, and nothing else: a GPU machine needs no more.
"""

import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Gather = Callable[["torch.Tensor"], "torch.Tensor"]  # this rank's tensor -> every rank's, [world, ...] in rank order


def map_peers(num_bytes: int, process_group: Any, device: "torch.device") -> tuple["torch.Tensor", tuple[int, ...]]:
    """`shareable` and `peer_addresses` in one, where nobody needs to be told of a rank that fails in between."""
    memory = shareable(num_bytes, device)
    return memory, peer_addresses(memory, process_group)


def shareable(num_bytes: int, device: "torch.device") -> "torch.Tensor":
    """`num_bytes` (uint8) of this rank's, which other ranks can map. Raises RuntimeError, which is torch's."""
    import torch
    from torch.distributed import _symmetric_memory as symmetric

    return symmetric.empty(num_bytes, dtype=torch.uint8, device=device)


def peer_addresses(memory: "torch.Tensor", process_group: Any, patience: float | None = None) -> tuple[int, ...]:
    """Where every rank's `memory` begins here, in rank order. Collective.

    patience: seconds that torch waits for each thing that another rank leaves in the group's store; None for the
    store's own limit (300 s and more). Raises RuntimeError, which is torch's, where a peer cannot be mapped, and
    where another rank was waited for in vain: a DistError, or one that tells of a timeout.
    """
    from torch.distributed import _symmetric_memory as symmetric

    with _store_patience(process_group, patience):
        handle = symmetric.rendezvous(memory, process_group)
    return tuple(int(address) for address in handle.buffer_ptrs)


@contextmanager
def _store_patience(process_group: Any, seconds: float | None) -> Iterator[None]:
    if seconds is None:
        yield
        return
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_process_group_store(process_group)  # noqa: SLF001 - torch has no other name for it
    before = store.timeout
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(before)


def unmappable(rank: int, gather: Gather, device: "torch.device") -> str | None:
    """The first pair of GPUs of one host that cannot reach each other's memory; the same answer on all ranks.

    GPUs that this process does not see, and those of other hosts, are left to the attempt.
    """
    import torch

    every = gather(torch.tensor(_identity(device), dtype=torch.int64, device=device)).tolist()
    seen = {_identity(torch.device("cuda", index))[1]: index for index in range(torch.cuda.device_count())}
    barred = [
        other
        for other, (host, gpu) in enumerate(every)
        if other != rank and host == every[rank][0] and gpu in seen and not _reaches(device, seen[gpu])
    ]
    first = torch.tensor([barred[0] if barred else -1], dtype=torch.int64, device=device)
    pairs = [(one, int(other)) for one, other in enumerate(gather(first).flatten().tolist()) if other >= 0]
    return f"rank {pairs[0][0]} cannot map the memory of rank {pairs[0][1]}" if pairs else None


def _identity(device: "torch.device") -> tuple[int, int]:
    """The host's and the GPU's names as numbers that other ranks can compare."""
    import torch

    return _number(socket.gethostname()), _number(str(torch.cuda.get_device_properties(device).uuid))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _reaches(device: "torch.device", other: int) -> bool:
    import torch

    return device.index == other or bool(torch.cuda.can_device_access_peer(device.index, other))
