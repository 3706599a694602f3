"""What `expert_reduce_rmsnorm_combine` computes: FP32 sums in rank order, then float64, rounded once.

What the other ranks sent comes from the inboxes, where `primitives.exchange_reference` (or a kernel) has put it:
partial rows of this rank's tokens, and the results of all others.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.expert_combine_rmsnorm import reference as combine
from kernel_specs.primitives import exchange_reference as exchange
from kernel_specs.primitives.inbox import EPOCH_COLUMNS, HALVES

PAYLOAD, INBOXES = "rows", ("row_inbox", "sum_inbox")


def expert_reduce_rmsnorm_combine(  # noqa: PLR0917 - the kernel's arguments, in its order
    rows: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight: Tensor,
    row_inbox: Tensor,
    row_peers: Tensor,
    sum_inbox: Tensor,
    sum_peers: Tensor,
    epochs: Tensor,
    failure: Tensor,
    out: Tensor,
    rank: int,
    timeout_us: int,
    eps: float,
    *,
    cluster: int,
    threads: int,
) -> None:
    """Empties both inboxes' halves, counts, and writes `out`."""
    world_size = len(row_inbox)
    mine = slice(rank, None, world_size)
    ids = topk_ids[mine]
    own = padded(present_rows(rows[mine], ids), row_inbox.shape[2])
    parts = exchange.receive(own, row_inbox, epochs, rank)[:, : len(ids)]
    owned = results_of(parts, ids, topk_weights[mine], weight, eps)
    results = exchange.receive(padded(owned, sum_inbox.shape[2]), sum_inbox, epochs, rank)
    exchange.count(epochs, cluster)
    tokens = torch.arange(len(rows), device=out.device)
    out.copy_(results[tokens % world_size, tokens // world_size])


def results_of(parts: Tensor, ids: Tensor, topk_weights: Tensor, weight: Tensor, eps: float) -> Tensor:
    """BF16 [tokens, moe_hidden_size] from every rank's rows [world, tokens, slots, moe_hidden_size] in rank order."""
    total = exchange.sum_in_rank_order(parts)
    result = torch.empty((len(ids), parts.shape[-1]), dtype=torch.bfloat16, device=parts.device)
    combine.expert_combine_rmsnorm(total[None], ids, topk_weights, weight, result, eps)
    return result


def present_rows(rows: Tensor, ids: Tensor) -> Tensor:
    """Zeros in place of the rows of ids -1."""
    return rows.masked_fill((ids < 0)[..., None], 0.0)


def padded(values: Tensor, places: int) -> Tensor:
    """`values` and zeros behind them, up to `places` tokens: not every rank owns as many."""
    made = torch.zeros((places, *values.shape[1:]), dtype=values.dtype, device=values.device)
    made[: len(values)] = values
    return made


def deliver(every: Tensor, arguments: Mapping[str, Any]) -> None:
    """Put every rank's `rows` [world, num_tokens, slots, moe_hidden_size] of this rank's tokens into its row_inbox, and
    what the owners of the others make of theirs into its sum_inbox.
    """
    rank, epochs, ids = arguments["rank"], arguments["epochs"], arguments["topk_ids"]
    row_inbox, sum_inbox = arguments["row_inbox"], arguments["sum_inbox"]
    world_size, places = row_inbox.shape[0], row_inbox.shape[2]
    parts = present_rows(every, ids)
    mine = slice(rank, None, world_size)
    exchange.deliver(torch.stack([padded(each[mine], places) for each in parts]), row_inbox, epochs, rank)
    theirs = range(world_size)
    results = results_of(parts, ids, arguments["topk_weights"], arguments["weight"], arguments["eps"])
    owned = [padded(results[source::world_size], places) for source in theirs]
    exchange.deliver(torch.stack(owned), sum_inbox, epochs, rank)
    row_inbox[:, :, len(ids[mine]) :] = 0  # places behind a rank's last token stay empty
    for source in theirs:
        sum_inbox[(rank - source) % world_size, :, len(results[source::world_size]) :] = 0


def deliver_alone(arguments: Mapping[str, Any]) -> None:
    """What a rank finds in its inboxes where every peer's address is its own: what it sends to the others itself.

    In the place of another rank's rows of its tokens lie its own rows of that rank's neighbour's tokens, and its own
    results in the places of all: no step of a model, but the same work, for a bench. Each rank owns as many tokens.
    """
    rank, epochs, ids = arguments["rank"], arguments["epochs"], arguments["topk_ids"]
    row_inbox, sum_inbox = arguments["row_inbox"], arguments["sum_inbox"]
    world_size, places = row_inbox.shape[0], row_inbox.shape[2]
    mine = slice(rank, None, world_size)
    rows = present_rows(arguments["rows"], ids)
    parts = torch.stack([rows[(2 * rank - source) % world_size :: world_size] for source in range(world_size)])
    exchange.deliver(torch.stack([padded(each, places) for each in parts]), row_inbox, epochs, rank)
    row_inbox[:, :, parts.shape[1] :] = 0
    owned = results_of(parts, ids[mine], arguments["topk_weights"][mine], arguments["weight"], arguments["eps"])
    exchange.deliver(padded(owned, places).expand(world_size, -1, -1), sum_inbox, epochs, rank)
    sum_inbox[:, :, len(owned) :] = 0


def random_world(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> tuple[dict[str, Any], Tensor]:
    """Rows of all ranks as expert_combine_rmsnorm draws them, and everything else alike."""
    world_size, places, device = axes["world_size"], axes["num_owned"], generator.device
    made: dict[str, Any] = dict(
        combine.random_arguments(specialization, {**axes, "num_partials": world_size}, generator)
    )
    every = made.pop("rows")
    made |= exchange.draw_exchange(axes["num_tokens"], EPOCH_COLUMNS, world_size, generator)
    tables = {name: made["peers"].clone() for name in ("row_peers", "sum_peers")}
    del made["peers"]
    inboxes = {
        "row_inbox": torch.zeros((world_size, HALVES, places, *every.shape[2:]), dtype=every.dtype, device=device),
        "sum_inbox": torch.zeros((world_size, HALVES, places, every.shape[-1]), dtype=torch.bfloat16, device=device),
    }
    return made | tables | inboxes, every


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    world = random_world(specialization, axes, generator)
    made: dict[str, Tensor | float | int] = exchange.one_rank(*world, PAYLOAD, deliver, INBOXES)
    return made


wire = exchange.wiring({"row_peers": "row_inbox", "sum_peers": "sum_inbox"})
