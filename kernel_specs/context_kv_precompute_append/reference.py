"""What `context_kv_precompute_append` computes, in float64 with the documented rounding points."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives import head_rows_reference as head_rows
from kernel_specs.primitives.head_rows_reference import HEAD_DIM
from kernel_specs.primitives.rows_reference import repeated, rms_normed


def context_kv_precompute_append(kv: Tensor, *rest: Any, rope: bool, num_layers: int) -> None:
    """`rest` is [positions, cos_sin], the slot mappings, the KV caches, eps. Updates the caches in place."""
    *table, eps = rest
    slot_mappings, kv_caches = table[-2 * num_layers : -num_layers], table[-num_layers:]
    heads = kv.view(kv.shape[0], num_layers, 2, -1, HEAD_DIM)
    keys = rms_normed(heads[:, :, 0].double(), eps).to(kv.dtype)
    if rope:
        keys = head_rows.rotate(keys.double(), *table[:2]).to(kv.dtype)
    for layer, (slot_mapping, kv_cache) in enumerate(zip(slot_mappings, kv_caches, strict=True)):
        head_rows.append(kv_cache, slot_mapping, keys[:, layer], heads[:, layer, 1])


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Other slots in each layer, every fifth row without one; caches are token-major (NHD) when `num_blocks` is odd."""
    num_tokens, num_blocks = axes["num_tokens"], axes["num_blocks"]
    scales = repeated(head_rows.ROW_SCALES, num_tokens, generator.device)[:, None]
    kv = torch.randn((num_tokens, axes["kv_size"]), generator=generator, device=generator.device)
    made: dict[str, Tensor | float] = {"kv": (kv * scales).bfloat16(), "eps": 1e-5}
    for layer in range(int(specialization.statics["num_layers"])):
        made[f"slot_mapping_{layer}"] = head_rows.draw_slots(num_tokens, num_blocks, 3 + layer, generator)
        made[f"kv_cache_{layer}"] = head_rows.draw_cache(num_blocks, axes["num_kv_heads"], generator)
    if specialization.statics["rope"]:
        made |= head_rows.draw_positions(num_tokens, axes["max_position"], generator)
    return made
