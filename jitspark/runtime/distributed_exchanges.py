"""The exchanges over torch.distributed, where ranks cannot map each other's memory: a gather, then torch.

Slow and simple: each operation does what its kernel does, with the same arguments and roundings, through any backend's
all-gather. Nothing is kept between calls but the counters, and nothing waits for the GPU.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jitspark.registry import load_spec, resolve

EXCHANGES = (
    "allreduce_gated_residual_rmsnorm",
    "allgather_gated_residual_rmsnorm",
    "allgather_columns",
    "expert_reduce_rmsnorm_combine",
)

Gather = Callable[[torch.Tensor], torch.Tensor]  # this rank's tensor -> every rank's, [world, ...] in rank order


def distributed_operations(provider: str, gather: Gather) -> Mapping[tuple[str, str], Callable[..., None]]:
    """What serves all exchanges of a plan for `provider`, by (provider, operation)."""
    return {(provider, name): exchange_over(name, gather) for name in EXCHANGES}


def exchange_over(operation: str, gather: Gather) -> Callable[..., None]:
    """`operation`, called with its kernel's arguments and then its statics by name."""
    spec = load_spec(operation)
    path, name = resolve(operation, spec.reference)
    module = importlib.import_module(path)
    reference: Callable[..., None] = getattr(module, name)

    def call(*arguments: Any, **statics: Any) -> None:
        present = [arg for arg in spec.args if arg.when is None or statics[arg.when[0]] == arg.when[1]]
        named = {arg.name: value for arg, value in zip(present, arguments, strict=True)}
        module.deliver(gather(named[module.PAYLOAD]), named)
        reference(*arguments, **statics)

    return call
