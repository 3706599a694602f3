"""What `expert_reduce_rmsnorm_combine` computes: FP32 sums in rank order, then float64, rounded once.

What the other ranks sent comes from the inboxes, where `primitives.exchange_reference` (or a kernel) has put it:
partial rows of this rank's tokens, and the results of all others.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.expert_combine_rmsnorm import reference as combine
from kernel_specs.primitives import exchange_reference as exchange
from kernel_specs.primitives.inbox import EPOCH_COLUMNS


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
    world_size, num_tokens = len(row_inbox), len(rows)
    owned = own_results(rows, topk_ids, topk_weights, weight, row_inbox, epochs, rank, eps)
    results = exchange.receive(padded(owned, sum_inbox.shape[2]), sum_inbox, epochs, rank)
    exchange.count(epochs, cluster)
    tokens = torch.arange(num_tokens, device=out.device)
    out.copy_(results[tokens % world_size, tokens // world_size])


def own_results(
    rows: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    weight: Tensor,
    row_inbox: Tensor,
    epochs: Tensor,
    rank: int,
    eps: float,
) -> Tensor:
    """The results [tokens owned, moe_hidden_size] in BF16 of this rank's tokens; empties the inbox' half."""
    world_size = len(row_inbox)
    mine = slice(rank, None, world_size)
    ids = topk_ids[mine]
    present = (ids >= 0)[..., None]
    own = torch.where(present, rows[mine], torch.zeros_like(rows[mine]))
    parts = exchange.receive(padded(own, row_inbox.shape[2]), row_inbox, epochs, rank)[:, : len(ids)]
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    result = torch.empty((len(ids), rows.shape[-1]), dtype=torch.bfloat16, device=rows.device)
    combine.expert_combine_rmsnorm(total[None], ids, topk_weights[mine], weight, result, eps)
    return result


def padded(values: Tensor, places: int) -> Tensor:
    """`values` and zeros behind them, up to `places` tokens: not every rank owns as many."""
    made = torch.zeros((places, *values.shape[1:]), dtype=values.dtype, device=values.device)
    made[: len(values)] = values
    return made


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    """Rows of all ranks as expert_combine_rmsnorm draws them; those of this rank's tokens wait in the inbox, and so
    does what other owners would send: any rows.
    """
    world_size, num_tokens, places = axes["world_size"], axes["num_tokens"], axes["num_owned"]
    made = combine.random_arguments(specialization, {**axes, "num_partials": world_size}, generator)
    made |= exchange.draw_exchange(num_tokens, EPOCH_COLUMNS, world_size, generator)
    rank, parts, ids = made["rank"], made.pop("rows"), made["topk_ids"]
    assert isinstance(rank, int) and isinstance(parts, Tensor) and isinstance(ids, Tensor)
    mine = slice(rank, None, world_size)
    row_inbox = torch.zeros((world_size, 2, places, *parts.shape[2:]), dtype=parts.dtype, device=parts.device)
    half = int(exchange.half_of(made["epochs"]))
    sent = exchange.packets(parts[1:, mine].masked_fill((ids[mine] < 0)[..., None], 0.0))
    sent[:, :, 1:] = sent[:, :, 1:].masked_fill((ids[mine] < 0)[:, 1:, None], 0.0)  # not sent at all
    row_inbox[1:, half, : sent.shape[1]] = sent
    sum_inbox = torch.zeros((world_size, 2, places, parts.shape[-1]), dtype=torch.bfloat16, device=parts.device)
    for slot in range(1, world_size):
        theirs = len(range((rank - slot) % world_size, num_tokens, world_size))
        drawn = torch.randn((theirs, parts.shape[-1]), generator=generator, device=parts.device)
        sum_inbox[slot, half, :theirs] = exchange.packets(drawn.bfloat16())
    del made["peers"]
    tables = {
        name: torch.zeros(world_size, dtype=torch.int64, device=parts.device) for name in ("row_peers", "sum_peers")
    }
    return made | tables | {"rows": parts[0].clone(), "row_inbox": row_inbox, "sum_inbox": sum_inbox}


wire = exchange.wiring({"row_peers": "row_inbox", "sum_peers": "sum_inbox"})
