"""Memory of one GPU that the others of a group map, over NVLink or PCIe: torch's symmetric memory, without multicast.

Imports torch where it is used, and nothing else: a GPU machine needs no more.
"""

import hashlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Gather = Callable[["torch.Tensor"], "torch.Tensor"]  # this rank's tensor -> every rank's, [world, ...] in rank order


def map_peers(num_bytes: int, process_group: Any, device: "torch.device") -> tuple["torch.Tensor", tuple[int, ...]]:
    """`num_bytes` on each rank's GPU (uint8): this rank's, and where each rank's begin here, in rank order. Collective.

    Raises RuntimeError, which is torch's, where a peer cannot be mapped.
    """
    import torch
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(memory, process_group)
    return memory, tuple(int(address) for address in handle.buffer_ptrs)


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
