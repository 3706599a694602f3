"""The weights and KV caches of vLLM's Muse Spark as a backbone's plans name them: the plan's contract, read.

Most are vLLM's own memory. Experts come from their shares, which are cut while the model is loaded. A tensor that is
not there is one WeightsError with its name.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jitspark.errors import WeightsError
from jitspark.plans.plan import Buffer, Kind, Plan, WeightSource
from jitspark.runtime.expert_tp import ExpertShares

if TYPE_CHECKING:
    import torch


def weights(plans: Iterable[Plan], model: Any, shares: ExpertShares | None, rank: int) -> "dict[str, torch.Tensor]":
    """Every weight of these plans by buffer name. `model` is vLLM's top-level class, `shares` its experts."""
    buffers = {each.name: each for plan in plans for each in plan.buffers if each.kind is Kind.WEIGHT}
    return {name: _weight(buffer, model, shares, rank) for name, buffer in buffers.items()}


def kv_caches(model: Any) -> "dict[str, torch.Tensor]":
    """Each layer's cache, keys and values packed: [blocks, KV heads, 16, 128]."""
    return {f"layers.{index}.kv_cache": attention(layer).kv_cache for index, layer in enumerate(model.model.layers)}


def share_rope_tables(model: Any) -> int:
    """Let all layers read one RoPE table, and return the bytes that this frees.

    vLLM makes one for each layer, 268 MB for 1,048,576 positions. They are compared first: raises WeightsError for one
    that is not equal to the first, which is what plans read for all layers.
    """
    import torch

    owners = {
        index: layer.self_attn.rotary_emb
        for index, layer in enumerate(model.model.layers)
        if getattr(layer.self_attn, "rotary_emb", None) is not None
    }
    freed = 0
    first: Any = next(iter(owners.values()), None)
    for index, owner in owners.items():
        table = owner.cos_sin_cache
        if table.data_ptr() == first.cos_sin_cache.data_ptr():
            continue
        if not torch.equal(table, first.cos_sin_cache):
            raise WeightsError(
                where=f"layers.{index}.self_attn.rotary_emb",
                found="another table than the first layer's",
                needed="one RoPE table for all layers",
                remedy="Run this deployment with stock vLLM (decode_backend auto), and report its configuration.",
            )
        freed += table.numel() * table.element_size()
        owner.cos_sin_cache = first.cos_sin_cache
    return freed


def attention(layer: Any) -> Any:
    """The attention of one of vLLM's decoder layers."""
    return layer.self_attn.attn


def routed_experts(model: Any) -> Mapping[int, Any]:
    """The routed-experts layers of vLLM's model by layer index."""
    return {index: layer.feed_forward.experts.routed_experts for index, layer in enumerate(model.model.layers)}


def _weight(buffer: Buffer, model: Any, shares: ExpertShares | None, rank: int) -> "torch.Tensor":
    source = buffer.source
    assert source is not None, buffer.name
    if source.tap == "checkpoint":
        return _share(buffer, shares)
    found = _first(model, source) if source.layout == "one_of_all" else _found(model, source.tensor)
    if source.layout == "rows_of_rank":
        rows = buffer.shape[0]
        assert isinstance(rows, int)
        found = found.narrow(0, rank * rows, rows)
    return found.detach()


def _share(buffer: Buffer, shares: ExpertShares | None) -> "torch.Tensor":
    _, layer, _, name = buffer.name.split(".", 3)
    assert shares is not None, buffer.name
    return shares.tensors(int(layer))[name].view(buffer.shape)


def _found(model: Any, name: str) -> "torch.Tensor":
    """A parameter or buffer below the text model, or of the head beside it."""
    import torch

    owner: Any = model if name.startswith("lm_head.") else model.model
    for step in name.split("."):
        owner = getattr(owner, step, None) if not step.isdigit() else owner[int(step)]
    if not isinstance(owner, torch.Tensor):
        raise WeightsError(
            where=name,
            found=f"{type(owner).__name__} in vLLM's model",
            needed="the parameter that the plan reads",
            remedy="Run this deployment with stock vLLM (decode_backend auto), and report its configuration.",
        )
    return owner


def _first(model: Any, source: WeightSource) -> "torch.Tensor":
    """Of tensors that every layer has alike, the first one there is: some layers have none (NoPE)."""
    before, after = source.tensor.split(".*.")
    owner = next(layer for layer in getattr(model.model, before) if getattr(layer.self_attn, "rotary_emb", None))
    index = list(getattr(model.model, before)).index(owner)
    return _found(model, f"{before}.{index}.{after}")
