"""What `allgather_columns` does: the shards of all ranks, side by side.

The other ranks' shards come from the inbox, where `primitives.exchange_reference.deliver` (or a kernel) has put them.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives import exchange_reference as exchange

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


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    """Shards with special values here and there, and whole packets of zeros; all but this rank's wait in the inbox."""
    world_size, shape = axes["world_size"], (axes["num_tokens"], axes["shard_size"])
    made: dict[str, Tensor | float | int] = exchange.draw_exchange(
        axes["num_tokens"], axes["num_chunks"], world_size, generator
    )
    shards = torch.randn((world_size, *shape), generator=generator, device=generator.device)
    chosen = torch.randint(40, shards.shape, generator=generator, device=generator.device)
    for i, value in enumerate(SPECIAL):
        shards[chosen == i] = value
    shards[..., :8] = 0.0
    parts = shards.bfloat16()
    inbox = exchange.draw_inbox((world_size, 2, *shape), made["epochs"], parts, generator)
    return made | {"shard": parts[0].clone(), "inbox": inbox}


wire = exchange.wiring({"peers": "inbox"})
