"""What `allgather_gated_residual_rmsnorm` computes: shards side by side, then the boundary in float64.

The other ranks' shards come from the inbox, where `deliver` (or a kernel) has put them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.gated_residual_rmsnorm import reference as boundary
from kernel_specs.primitives import exchange_reference as exchange
from kernel_specs.primitives.inbox import EPOCH_COLUMNS, HALVES

PAYLOAD, INBOXES = "shard", ("inbox",)


def allgather_gated_residual_rmsnorm(
    shard: Tensor,
    inbox: Tensor,
    peers: Tensor,
    epochs: Tensor,
    failure: Tensor,
    *rest: Any,
    cluster: int,
    **statics: Any,
) -> None:
    """`rest` is the boundary's arguments behind the branch, with rank and timeout_us before its scalars.

    Empties the inbox' half, counts, and writes what the boundary writes.
    """
    *tensors, rank, _, post_eps, eps = rest
    branch = torch.cat(list(exchange.receive(shard, inbox, epochs, rank)), dim=-1)
    exchange.count(epochs, cluster)
    boundary.gated_residual_rmsnorm(branch, *tensors, post_eps, eps, cluster=cluster, **statics)


def deliver(every: Tensor, arguments: Mapping[str, Any]) -> None:
    """Put every rank's `shard` [world, num_tokens, shard_size] into this rank's inbox."""
    exchange.deliver(every, arguments["inbox"], arguments["epochs"], arguments["rank"])


def random_world(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> tuple[dict[str, Any], Tensor]:
    """The boundary's arguments, alike on all ranks, and every rank's columns of its branch."""
    made: dict[str, Any] = dict(boundary.random_arguments(specialization, axes, generator))
    shards = torch.stack(made.pop("branch").chunk(axes["world_size"], dim=-1))
    made |= exchange.draw_exchange(axes["num_tokens"], EPOCH_COLUMNS, len(shards), generator)
    shape = (len(shards), HALVES, *shards.shape[1:])
    return made | {"inbox": torch.zeros(shape, dtype=torch.bfloat16, device=shards.device)}, shards


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    world = random_world(specialization, axes, generator)
    made: dict[str, Tensor | float | int] = exchange.one_rank(*world, PAYLOAD, deliver, INBOXES)
    return made


wire = exchange.wiring({"peers": "inbox"})
