"""The ranks of a benchmark as torch.distributed has them: what one has, gathered from all."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among them."""

    rank: int
    size: int
    process_group: Any

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """[world, ...] in rank order."""
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.process_group)
        return torch.stack(every)
