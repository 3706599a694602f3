"""What `allgather_gated_residual_rmsnorm` computes: shards side by side, then the boundary in float64.

The other ranks' shards come from the inbox, where `primitives.exchange_reference.deliver` (or a kernel) has put them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.gated_residual_rmsnorm import reference as boundary
from kernel_specs.primitives import exchange_reference as exchange
from kernel_specs.primitives.inbox import EPOCH_COLUMNS


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


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    """The boundary's arguments, its branch cut into shards: all but this rank's wait in the inbox."""
    made = boundary.random_arguments(specialization, axes, generator)
    branch = made.pop("branch")
    assert isinstance(branch, Tensor)
    world_size, shape = axes["world_size"], (axes["num_tokens"], axes["shard_size"])
    made |= exchange.draw_exchange(axes["num_tokens"], EPOCH_COLUMNS, world_size, generator)
    shards = torch.stack(branch.chunk(world_size, dim=-1))
    inbox = exchange.draw_inbox((world_size, 2, *shape), made["epochs"], shards, generator)
    return made | {"shard": shards[0].clone(), "inbox": inbox}


wire = exchange.wiring({"peers": "inbox"})
