"""What references of norms share: the norm itself, and rows of very different size."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def rms_normed(rows: Tensor, eps: float) -> Tensor:
    """rows * rsqrt(mean(rows^2) + eps), the mean over the last axis, in the dtype of `rows`."""
    return rows * torch.rsqrt(rows.square().mean(dim=-1, keepdim=True) + eps)


def repeated(sizes: Sequence[Any], count: int, device: torch.device | str) -> Tensor:
    """`count` of `sizes` (numbers, or tuples of as many), over and over again: [count] or [count, numbers]."""
    pattern = torch.tensor(sizes, device=device)
    return pattern[torch.arange(count, device=device) % len(sizes)]
