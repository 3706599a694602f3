"""The weights and KV caches of vLLM's draft model as its plans name them, read from the inner model.

All but the stacked norms are vLLM's own memory. A tensor that is not there is one WeightsError with its name.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jitspark.errors import WeightsError
from jitspark.plans.plan import Buffer, Kind, Plan, WeightSource

if TYPE_CHECKING:
    import torch

_EVERY = ".*."  # in a source's name: of every layer


def weights(plans: Iterable[Plan], model: Any) -> "dict[str, torch.Tensor]":
    """Every weight of these plans by buffer name."""
    buffers = {each.name: each for plan in plans for each in plan.buffers if each.kind is Kind.WEIGHT}
    return {name: _weight(buffer, model) for name, buffer in buffers.items()}


def kv_caches(layers: Iterable[Any]) -> "dict[str, torch.Tensor]":
    """Each layer's cache, keys and values packed: [blocks, KV heads, 16, 128]."""
    return {f"layers.{index}.kv_cache": attention(layer).kv_cache for index, layer in enumerate(layers)}


def attention(layer: Any) -> Any:
    """The attention that vLLM made of a decoder layer."""
    return layer.self_attn.attn


def _weight(buffer: Buffer, model: Any) -> "torch.Tensor":
    assert buffer.source is not None, buffer.name
    return _LAYOUTS[buffer.source.layout](model, buffer.source).detach()


def _as_is(model: Any, source: WeightSource) -> "torch.Tensor":
    return _found(model, source.tensor)


def _stacked(model: Any, source: WeightSource) -> "torch.Tensor":
    import torch

    return torch.stack([_found(model, name) for name in _of_every_layer(model, source)])


def _last(model: Any, source: WeightSource) -> "torch.Tensor":
    """Of tensors that all layers have alike, the last layer's: stock rounds the first one's table to BF16."""
    return _found(model, _of_every_layer(model, source)[-1])


_LAYOUTS: Mapping[str, Callable[[Any, WeightSource], Any]] = {
    "as_is": _as_is,
    "stacked": _stacked,
    "one_of_all": _last,
}


def _of_every_layer(model: Any, source: WeightSource) -> list[str]:
    owner, name = source.tensor.split(_EVERY)
    return [f"{owner}.{index}.{name}" for index in range(len(getattr(model, owner)))]


def _found(model: Any, name: str) -> "torch.Tensor":
    import torch

    owner: Any = model
    for step in name.split("."):
        owner = owner[int(step)] if step.isdigit() else getattr(owner, step, None)
    if not isinstance(owner, torch.Tensor):
        raise WeightsError(
            where=name,
            found=f"{type(owner).__name__} in vLLM's draft model",
            needed="the tensor that the plan reads",
            remedy="Run this deployment with stock vLLM (decode_backend auto), and report its draft's config.json.",
        )
    return owner
