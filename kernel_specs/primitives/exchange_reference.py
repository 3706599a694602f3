"""The exchanges' references: inboxes as the kernels fill and empty them (`inbox`), in torch, on CPU or GPU.

A reference takes what the other ranks sent from its inbox, as a kernel does. Its module's `deliver(every, arguments)`
puts it there, `every` being the argument named PAYLOAD of all ranks, [world, ...] in rank order, and `arguments` this
rank's by name. So a world of processes runs references over any torch.distributed group: gather, deliver, call.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kernel_specs.primitives.inbox import HALVES

# Eight bytes that are zero as numbers, and not as bits: -0 first
_ZERO_PACKET = {torch.bfloat16: 0x8000, torch.float32: 0x80000000, torch.int32: -(2**63)}


def packets(payload: Tensor) -> Tensor:
    """The payload as it travels: nothing but its packets of zeros is changed, in the sign of one zero."""
    words = payload.contiguous().view(torch.int64)
    return torch.where(words == 0, _ZERO_PACKET[payload.dtype], words).view(payload.dtype)


def half_of(epochs: Tensor) -> Tensor:
    """The half that the next exchange uses, as an index: an int64 tensor of one element, so that nothing waits."""
    return epochs.flatten()[:1].long() % HALVES


def deliver(payloads: Tensor, inbox: Tensor, epochs: Tensor, rank: int) -> None:
    """Put `payloads` [world, ...] of all ranks into rank's `inbox` [world, 2, ...] for the next exchange."""
    slots = (rank - torch.arange(len(payloads), device=inbox.device)) % len(payloads)
    half = half_of(epochs).expand(len(payloads))
    inbox.index_put_((slots, half), packets(payloads))


def receive(own: Tensor, inbox: Tensor, epochs: Tensor, rank: int) -> Tensor:
    """What every rank sent, in rank order [world, ...], `own` in this rank's place; the half is empty afterwards."""
    world_size = len(inbox)
    half = half_of(epochs)
    received = inbox.index_select(1, half).squeeze(1)
    received[0] = packets(own)
    inbox.index_fill_(1, half, 0)
    return received[(rank - torch.arange(world_size, device=inbox.device)) % world_size]


def count(epochs: Tensor, columns: int) -> None:
    """The exchange is over for the CTAs that took part: the first `columns` of each row."""
    epochs[:, :columns] += 1


def sum_in_rank_order(parts: Tensor) -> Tensor:
    """FP32, one addition after the other: a documented rounding point, and bit for bit what the kernels do."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def one_rank(
    common: Mapping[str, Any], every: Tensor, payload: str, deliver: Callable[..., None], inboxes: tuple[str, ...]
) -> dict[str, Any]:
    """Arguments for a kernel alone: what the other ranks send waits in its inboxes, its own is still to be sent."""
    made = {**common, payload: every[common["rank"]].clone()}
    deliver(every, made)
    for name in inboxes:
        made[name][0] = 0
    return made


def draw_exchange(num_rows: int, columns: int, world_size: int, generator: torch.Generator) -> dict[str, Any]:
    """A rank, counters of an inbox that was used before, and the other arguments that every exchange has.

    The rank is one of the case's own, as a captured launch keeps its scalars. `peers` is filled by `wire`, where memory
    is known.
    """

    device = generator.device
    launches = int(torch.randint(1000, (), generator=generator, device=device))
    return {
        "peers": torch.zeros(world_size, dtype=torch.int64, device=device),
        "epochs": torch.full((num_rows, columns), launches, dtype=torch.int32, device=device),
        "failure": torch.zeros(1, dtype=torch.int32, device=device),
        "rank": (3 * num_rows + 1) % world_size,
        "timeout_us": 2_000_000,
    }


def wiring(names: Mapping[str, str]) -> Callable[..., tuple[dict[str, Tensor], list[Tensor]]]:
    """What makes the tables of peers for a rank alone: its own inbox, and memory that nobody reads for the others'.

    names: the inbox of each table; those that a specialization lacks are passed over. `wire(tensors, rank=)` returns
    the tables, and what must live as long as they do.
    """

    def wire(tensors: Mapping[str, Tensor], *, rank: int, **_: float) -> tuple[dict[str, Tensor], list[Tensor]]:
        tables: dict[str, Tensor] = {}
        unread: list[Tensor] = []
        for peers, inbox in ((peers, inbox) for peers, inbox in names.items() if inbox in tensors):
            unread.append(torch.zeros_like(tensors[inbox], memory_format=torch.contiguous_format))
            addresses = [unread[-1].data_ptr()] * len(tensors[peers])
            addresses[rank] = tensors[inbox].data_ptr()
            tables[peers] = torch.tensor(addresses, dtype=torch.int64, device=tensors[peers].device)
        return tables, unread

    return wire
