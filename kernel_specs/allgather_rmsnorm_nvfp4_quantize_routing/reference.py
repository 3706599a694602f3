"""What `allgather_rmsnorm_nvfp4_quantize_routing` computes: the references of the kernels that it stands for, in turn.

The other ranks' shards come from the inbox, where `deliver` (or a kernel) has put them.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives import exchange_reference as exchange
from kernel_specs.primitives.inbox import HALVES
from kernel_specs.rmsnorm_nvfp4_quantize import reference as quantize
from kernel_specs.sigmoid_bias_topk_routing import reference as routing

PAYLOAD, INBOXES = "shard", ("inbox",)
WEIGHT_SEED = 11


def allgather_rmsnorm_nvfp4_quantize_routing(
    shard: Tensor,
    inbox: Tensor,
    peers: Tensor,
    epochs: Tensor,
    failure: Tensor,
    weight: Tensor,
    global_scale: Tensor,
    *rest: Any,
) -> None:
    """`rest` is logits, bias, is_padding, codes, scales, the routing's outputs, then rank, timeout_us and eps.

    Empties the inbox' half, counts, and writes the outputs.
    """
    logits, bias, is_padding, codes, scales, *chosen, rank, _, eps = rest
    row = torch.cat(list(exchange.receive(shard, inbox, epochs, rank)), dim=-1)
    exchange.count(epochs, 1)
    quantize.rmsnorm_nvfp4_quantize(row, weight, global_scale, codes, scales, eps)
    routing.sigmoid_bias_topk_routing(logits, bias, is_padding, *chosen, padded=True)


def deliver(every: Tensor, arguments: Mapping[str, Any]) -> None:
    """Put every rank's `shard` [world, num_tokens, shard_size] into this rank's inbox."""
    exchange.deliver(every, arguments["inbox"], arguments["epochs"], arguments["rank"])


def random_world(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> tuple[dict[str, Any], Tensor]:
    """The arguments that ranks have alike, and every rank's columns, whose norms round clearly.

    The weight is the same in every draw, as a row is clear under one weight.
    """
    device = generator.device
    own = torch.Generator(device).manual_seed(WEIGHT_SEED)
    weight = quantize.random_weight(axes["hidden_size"], own)
    row = quantize.clear_rows(axes["num_tokens"], weight, generator)
    shards = torch.stack(row.chunk(axes["world_size"], dim=-1))
    made: dict[str, Any] = exchange.draw_exchange(axes["num_tokens"], 1, len(shards), generator)
    shape = (len(shards), HALVES, *shards.shape[1:])
    made |= {"inbox": torch.zeros(shape, dtype=torch.bfloat16, device=device), "weight": weight}
    made |= {"global_scale": quantize.random_global_scale(generator), "eps": quantize.EPS}
    return made | routing.random_choices(axes, generator, padded=True), shards


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float | int]:
    world = random_world(specialization, axes, generator)
    made: dict[str, Tensor | float | int] = exchange.one_rank(*world, PAYLOAD, deliver, INBOXES)
    return made


wire = exchange.wiring({"peers": "inbox"})
