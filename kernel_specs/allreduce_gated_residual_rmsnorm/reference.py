"""What `allreduce_gated_residual_rmsnorm` computes: FP32 sums in rank order, then the boundary in float64.

The other ranks' rows come from the inbox, where `primitives.exchange_reference.deliver` (or a kernel) has put them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.gated_residual_rmsnorm import reference as boundary
from kernel_specs.primitives import exchange_reference as exchange
from kernel_specs.primitives.inbox import EPOCH_COLUMNS


def allreduce_gated_residual_rmsnorm(
    partial: Tensor,
    inbox: Tensor,
    peers: Tensor,
    epochs: Tensor,
    failure: Tensor,
    *rest: Any,
    round_sum: bool,
    cluster: int,
    **statics: Any,
) -> None:
    """`rest` is the boundary's arguments behind the branch, with rank and timeout_us before its scalars.

    Empties the inbox' half, counts, and writes what the boundary writes.
    """
    *tensors, rank, _, post_eps, eps = rest
    total = sum_in_rank_order(exchange.receive(partial, inbox, epochs, rank))
    exchange.count(epochs, cluster)
    if round_sum:
        total = total.bfloat16()
    boundary.gated_residual_rmsnorm(total, *tensors, post_eps, eps, cluster=cluster, **statics)


def sum_in_rank_order(parts: Tensor) -> Tensor:
    """FP32, one addition after the other: a documented rounding point, and bit for bit what the kernels do."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    """The boundary's arguments, its branch taken apart into partial rows: all but this rank's wait in the inbox."""
    made = boundary.random_arguments(specialization, axes, generator)
    branch = made.pop("branch")
    assert isinstance(branch, Tensor)
    world_size = axes["world_size"]
    made |= exchange.draw_exchange(axes["num_tokens"], EPOCH_COLUMNS, world_size, generator)
    noise = torch.randn((world_size, *branch.shape), generator=generator, device=generator.device)
    scale = branch.float().abs().amax(dim=-1, keepdim=True)
    parts = (branch.float() / world_size + 0.3 * scale * noise).bfloat16()
    inbox = exchange.draw_inbox((world_size, 2, *branch.shape), made["epochs"], parts, generator)
    return made | {"partial": parts[0], "inbox": inbox}


wire = exchange.wiring({"peers": "inbox"})
