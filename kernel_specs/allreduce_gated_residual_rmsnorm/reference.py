"""What `allreduce_gated_residual_rmsnorm` computes: FP32 sums in rank order, then the boundary in float64.

The other ranks' rows come from the inbox, where `deliver` (or a kernel) has put them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.gated_residual_rmsnorm import reference as boundary
from kernel_specs.primitives import exchange_reference as exchange
from kernel_specs.primitives.inbox import EPOCH_COLUMNS, HALVES

PAYLOAD, INBOXES = "partial", ("inbox",)


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
    total = exchange.sum_in_rank_order(exchange.receive(partial, inbox, epochs, rank))
    exchange.count(epochs, cluster)
    if round_sum:
        total = total.bfloat16()
    boundary.gated_residual_rmsnorm(total, *tensors, post_eps, eps, cluster=cluster, **statics)


def deliver(every: Tensor, arguments: Mapping[str, Any]) -> None:
    """Put every rank's `partial` [world, num_tokens, hidden_size] into this rank's inbox."""
    exchange.deliver(every, arguments["inbox"], arguments["epochs"], arguments["rank"])


def random_world(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> tuple[dict[str, Any], Tensor]:
    """The boundary's arguments, alike on all ranks, and every rank's part of its branch."""
    made: dict[str, Any] = dict(boundary.random_arguments(specialization, axes, generator))
    branch = made.pop("branch").float()
    world_size = axes["world_size"]
    made |= exchange.draw_exchange(axes["num_tokens"], EPOCH_COLUMNS, world_size, generator)
    made["inbox"] = torch.zeros((world_size, HALVES, *branch.shape), dtype=torch.bfloat16, device=branch.device)
    noise = torch.randn((world_size, *branch.shape), generator=generator, device=generator.device)
    scale = branch.abs().amax(dim=-1, keepdim=True)
    return made, (branch / world_size + 0.3 * scale * noise).bfloat16()


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    world = random_world(specialization, axes, generator)
    made: dict[str, Tensor | float | int] = exchange.one_rank(*world, PAYLOAD, deliver, INBOXES)
    return made


wire = exchange.wiring({"peers": "inbox"})
