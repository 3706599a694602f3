"""Free memory of a device, compared with what is needed before anything is allocated. Torch only."""

import torch

from jitspark.errors import DeviceMemoryError

GIB = 1 << 30
REMEDY = "Use more ranks or GPUs with more memory, or run without the specialized decode."


def free_bytes(device: torch.device) -> int:
    """What can still be allocated: free on the GPU and unused in torch's own pool; on a CPU what the system has."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    with open("/proc/meminfo", encoding="ascii") as file:
        lines = dict(line.split(":", 1) for line in file)
    return int(lines["MemAvailable"].split()[0]) * 1024


def check(where: str, device: torch.device, needed: int, free: int, remedy: str = REMEDY) -> None:
    """Raises DeviceMemoryError, which names both, where less is free than needed."""
    if free < needed:
        raise DeviceMemoryError(
            where=f"{where} on {device}",
            found=f"{free / GIB:.1f} GiB free",
            needed=f"{needed / GIB:.1f} GiB",
            remedy=remedy,
        )


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given, so that its failures come up here."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
