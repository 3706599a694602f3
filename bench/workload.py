"""The arguments of a measured chain of launches: cold weights, warm activations, as in a decode step.

Weights rotate over more than the L2 cache holds. Per-token tensors go round a few buffers, as in a step, where the
launch before has just written them.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from jitspark.checking.arguments import draw_arguments, shape_of, tensor_args, torch_dtype
from jitspark.spec import VAR, Scalar, Specialization, Tensor

MIN_ROTATION_BYTES = 200_000_000
MAX_SETS = 2048
TOKEN_SETS = 4
DISTINCT_DRAWS = 4

# Where a chain of one kernel feeds itself: this input is what the launch before wrote there; state stays one tensor.
FEEDS = {"gated_residual_rmsnorm": ("branch", "activation")}
STATE = {"gated_residual_rmsnorm": ("stream",)}

Values = Mapping[str, Any]  # by argument, in call order


@dataclass(frozen=True, slots=True)
class Workload:
    """A specialization at given sizes, its argument sets, and the bytes that one launch must move."""

    specialization: Specialization
    axes: Mapping[str, int]
    sets: Sequence[Values]
    moved_bytes: int


def build(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator, rotation_bytes: int
) -> Workload:
    """Argument sets for a chain on the generator's device: as many as it takes for weights of `rotation_bytes`."""
    weights = [arg for arg in tensor_args(specialization) if _is_weight(specialization, arg)]
    weight_bytes = sum(_bytes(specialization, arg, axes) for arg in weights)
    needed = -(-rotation_bytes // max(weight_bytes, 1))
    # whole rounds over the per-token buffers, so that a fed input is never the launch's own output
    count = min(-(-needed // TOKEN_SETS) * TOKEN_SETS, MAX_SETS) if weights else TOKEN_SETS
    draws = [draw_arguments(specialization, axes, generator) for _ in range(min(count, DISTINCT_DRAWS))]
    pools = {
        arg.name: _pool(specialization, arg, axes, count, [draw.get(arg.name) for draw in draws], generator.device)
        for arg in specialization.args
    }
    sets = [{name: pool[i % len(pool)] for name, pool in pools.items()} for i in range(count)]
    if specialization.name in FEEDS:
        fed, source = FEEDS[specialization.name]
        for before, values in zip([sets[-1], *sets[:-1]], sets, strict=True):
            values[fed] = before[source]
    return Workload(specialization, axes, sets, moved_bytes(specialization, axes))


def rotation_bytes() -> int:
    """How much weight goes by before one is read again: more than twice what the L2 cache holds."""
    return max(2 * int(torch.cuda.get_device_properties(0).L2_cache_size), MIN_ROTATION_BYTES)


def moved_bytes(specialization: Specialization, axes: Mapping[str, int]) -> int:
    """What one launch must move: inputs, outputs once, updated tensors twice, one row a token of tables and caches."""
    return sum(
        _bytes(specialization, arg, axes) * (2 if arg.role == "inout" and _per_token(arg) else 1)
        for arg in tensor_args(specialization)
    )


def copied(values: Values) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}


def _pool(
    specialization: Specialization,
    arg: Tensor | Scalar,
    axes: Mapping[str, int],
    count: int,
    drawn: Sequence[Any],
    device: torch.device,
) -> list[Any]:
    """The values that an argument takes in turn."""
    if isinstance(arg, Scalar) or arg.name in STATE.get(specialization.name, ()):
        return [drawn[0]]
    if arg.role == "out":
        shape, dtype = shape_of(specialization, arg, axes), torch_dtype(specialization, arg)
        return [torch.randn(shape, device=device).to(dtype) for _ in range(TOKEN_SETS)]
    if _is_weight(specialization, arg):
        more = (value.clone() for value in itertools.cycle(drawn))
        return [*drawn, *itertools.islice(more, count - len(drawn))]
    if _per_token(arg):
        return [*drawn, *(value.clone() for value in drawn)][:TOKEN_SETS]
    return [drawn[0]]  # a table or a cache, which all layers share or which is far larger than what is touched


def _is_weight(specialization: Specialization, arg: Tensor) -> bool:
    return arg.role == "in" and not any(specialization.spec.axes.get(str(axis)) is VAR for axis in arg.axes)


def _per_token(arg: Tensor) -> bool:
    return "num_tokens" in arg.axes


def _bytes(specialization: Specialization, arg: Tensor, axes: Mapping[str, int]) -> int:
    shape = shape_of(specialization, arg, axes)
    item = torch_dtype(specialization, arg).itemsize
    if _is_weight(specialization, arg) or _per_token(arg):
        return _product(shape) * item
    if arg.name == "kv_cache":  # [blocks, heads, slots, width]: one slot of every head
        return axes["num_tokens"] * shape[1] * shape[3] * item
    return axes["num_tokens"] * _product(shape[1:]) * item  # a table: one row a token


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
