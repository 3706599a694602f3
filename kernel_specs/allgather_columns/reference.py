"""What `allgather_columns` does: the shards of all ranks, side by side.

The other ranks' shards come from the inbox, where `deliver` (or a kernel) has put them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives import exchange_reference as exchange
from kernel_specs.primitives.inbox import HALVES

PAYLOAD, INBOXES = "shard", ("inbox",)
SPECIAL = (0.0, -0.0, torch.inf, -torch.inf, 1e-38)


def allgather_columns(
    shard: Tensor,
    inbox: Tensor,
    peers: Tensor,
    epochs: Tensor,
    failure: Tensor,
    out: Tensor,
    rank: int,
    timeout_us: int,
    *,
    threads: int,
) -> None:
    """Empties the inbox' half, counts, and writes `out`."""
    out.copy_(torch.cat(list(exchange.receive(shard, inbox, epochs, rank)), dim=-1))
    exchange.count(epochs, epochs.shape[1])


def deliver(every: Tensor, arguments: Mapping[str, Any]) -> None:
    """Put every rank's `shard` [world, num_tokens, shard_size] into this rank's inbox."""
    exchange.deliver(every, arguments["inbox"], arguments["epochs"], arguments["rank"])


def random_world(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> tuple[dict[str, Any], Tensor]:
    """Shards with special values here and there, and whole packets of zeros."""
    world_size, shape = axes["world_size"], (axes["num_tokens"], axes["shard_size"])
    made = exchange.draw_exchange(axes["num_tokens"], axes["num_chunks"], world_size, generator)
    shards = torch.randn((world_size, *shape), generator=generator, device=generator.device)
    chosen = torch.randint(40, shards.shape, generator=generator, device=generator.device)
    for i, value in enumerate(SPECIAL):
        shards[chosen == i] = value
    shards[..., :8] = 0.0
    inbox = torch.zeros((world_size, HALVES, *shape), dtype=torch.bfloat16, device=generator.device)
    return made | {"inbox": inbox}, shards.bfloat16()


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    world = random_world(specialization, axes, generator)
    made: dict[str, Tensor | float | int] = exchange.one_rank(*world, PAYLOAD, deliver, INBOXES)
    return made


wire = exchange.wiring({"peers": "inbox"})
