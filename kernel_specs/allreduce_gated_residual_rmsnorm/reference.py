"""What `allreduce_gated_residual_rmsnorm` computes: FP32 sums in rank order, then the boundary in float64.

The other ranks' rows come from the inbox, where `deliver` (or a kernel) has put them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.allreduce_gated_residual_rmsnorm.spec import BLOCK
from kernel_specs.gated_residual_rmsnorm import reference as boundary
from kernel_specs.primitives import exchange_reference as exchange
from kernel_specs.primitives.inbox import EPOCH_COLUMNS, HALVES

PAYLOAD, INBOXES = "partial", ("inbox", "row_inbox", "sum_inbox")


def allreduce_gated_residual_rmsnorm(
    partial: Tensor, *rest: Any, round_sum: bool, shots: int, cluster: int, **statics: Any
) -> None:
    """`rest`: the inboxes and their peers, epochs, failure; the boundary's arguments behind the branch, with rank and
    timeout_us before its scalars.

    Empties the inboxes' halves, counts, and writes what the boundary writes.
    """
    *inboxes, epochs, _ = rest[: 4 if shots == 1 else 6]
    *tensors, rank, _, post_eps, eps = rest[len(inboxes) + 2 :]
    if shots == 1:
        total = exchange.sum_in_rank_order(exchange.receive(partial, inboxes[0], epochs, rank))
    else:
        row_inbox, _, sum_inbox, _ = inboxes
        columns = owned_columns(partial.shape[-1], len(row_inbox), partial.device)
        owned = exchange.sum_in_rank_order(exchange.receive(partial[:, columns[rank]], row_inbox, epochs, rank))
        total = torch.empty(partial.shape, dtype=torch.float32, device=partial.device)
        total[:, columns] = exchange.receive(owned, sum_inbox, epochs, rank).transpose(0, 1)
    exchange.count(epochs, cluster)
    if round_sum:
        total = total.bfloat16()
    boundary.gated_residual_rmsnorm(total, *tensors, post_eps, eps, cluster=cluster, **statics)


def owned_columns(hidden_size: int, world_size: int, device: torch.device) -> Tensor:
    """The columns that each rank sums, with two shots, in the order in which they travel: [world, shard_size]."""
    blocks = torch.arange(hidden_size, device=device).view(-1, world_size, BLOCK)
    return blocks.transpose(0, 1).reshape(world_size, -1)


def deliver(every: Tensor, arguments: Mapping[str, Any]) -> None:
    """Put every rank's `partial` [world, num_tokens, hidden_size] into this rank's inbox; with two shots its columns
    of them, and all ranks' sums.
    """
    epochs, rank = arguments["epochs"], arguments["rank"]
    if "inbox" in arguments:
        exchange.deliver(every, arguments["inbox"], epochs, rank)
        return
    columns = owned_columns(every.shape[-1], len(every), every.device)
    exchange.deliver(every[..., columns[rank]], arguments["row_inbox"], epochs, rank)
    sums = exchange.sum_in_rank_order(every)[:, columns].transpose(0, 1)
    exchange.deliver(sums, arguments["sum_inbox"], epochs, rank)


def deliver_alone(arguments: Mapping[str, Any]) -> None:
    """What a rank finds in its inboxes where every peer's address is its own: what it sends to the others itself.

    With two shots its own columns for another rank lie in the place of a third's for it, and its own sums in the places
    of all: no step of a model, but the same work, for a bench.
    """
    partial, epochs, rank = arguments[PAYLOAD], arguments["epochs"], arguments["rank"]
    world_size = len(arguments["inbox"] if "inbox" in arguments else arguments["row_inbox"])
    if "inbox" in arguments:
        exchange.deliver(partial.expand(world_size, *partial.shape), arguments["inbox"], epochs, rank)
        return
    columns = owned_columns(partial.shape[-1], world_size, partial.device)
    parts = torch.stack([partial[:, columns[(2 * rank - source) % world_size]] for source in range(world_size)])
    exchange.deliver(parts, arguments["row_inbox"], epochs, rank)
    owned = exchange.sum_in_rank_order(parts)
    exchange.deliver(owned.expand(world_size, *owned.shape), arguments["sum_inbox"], epochs, rank)


def random_world(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> tuple[dict[str, Any], Tensor]:
    """The boundary's arguments, alike on all ranks, and every rank's part of its branch."""
    made: dict[str, Any] = dict(boundary.random_arguments(specialization, axes, generator))
    branch = made.pop("branch").float()
    world_size = axes["world_size"]
    made |= exchange.draw_exchange(axes["num_tokens"], EPOCH_COLUMNS, world_size, generator)
    made |= _inboxes(specialization.statics["shots"], world_size, branch, made.pop("peers"))
    noise = torch.randn((world_size, *branch.shape), generator=generator, device=generator.device)
    scale = branch.abs().amax(dim=-1, keepdim=True)
    return made, (branch / world_size + 0.3 * scale * noise).bfloat16()


def _inboxes(shots: object, world_size: int, branch: Tensor, peers: Tensor) -> dict[str, Tensor]:
    """Empty ones, with tables of peers that are still to be filled."""
    if shots == 1:
        shape = (world_size, HALVES, *branch.shape)
        return {"inbox": torch.zeros(shape, dtype=torch.bfloat16, device=branch.device), "peers": peers}
    shape = (world_size, HALVES, len(branch), branch.shape[-1] // world_size)
    return {
        "row_inbox": torch.zeros(shape, dtype=torch.bfloat16, device=branch.device),
        "row_peers": peers,
        "sum_inbox": torch.zeros(shape, dtype=torch.float32, device=branch.device),
        "sum_peers": peers.clone(),
    }


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    world = random_world(specialization, axes, generator)
    inboxes = tuple(name for name in INBOXES if name in world[0])
    made: dict[str, Tensor | float | int] = exchange.one_rank(*world, PAYLOAD, deliver, inboxes)
    return made


wire = exchange.wiring({"peers": "inbox", "row_peers": "row_inbox", "sum_peers": "sum_inbox"})
