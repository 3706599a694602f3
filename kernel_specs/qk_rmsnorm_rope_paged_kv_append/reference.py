"""What `qk_rmsnorm_rope_paged_kv_append` computes, in float64 with the documented rounding points."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives import head_rows_reference as head_rows
from kernel_specs.primitives.head_rows_reference import HEAD_DIM
from kernel_specs.primitives.rows_reference import repeated, rms_normed


def qk_rmsnorm_rope_paged_kv_append(qkvg: Tensor, *rest: Any, rope: bool) -> None:
    """`rest` is [positions, cos_sin], slot_mapping, kv_cache, eps. Updates `qkvg` (q and k) and `kv_cache` in place."""
    *table, slot_mapping, kv_cache, eps = rest
    num_kv_heads = kv_cache.shape[1]
    heads = qkvg.view(qkvg.shape[0], -1, HEAD_DIM)
    first_key = heads.shape[1] // 2 - num_kv_heads
    first_value = first_key + num_kv_heads
    normed = rms_normed(heads[:, :first_value].double(), eps)
    heads[:, :first_value] = (head_rows.rotate(normed, *table) if rope else normed).to(qkvg.dtype)
    keys, values = heads[:, first_key:first_value], heads[:, first_value : first_value + num_kv_heads]
    head_rows.append(kv_cache, slot_mapping, keys, values)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Every fifth token has no slot; the cache is token-major (NHD) when `num_blocks` is odd."""
    num_tokens, num_blocks = axes["num_tokens"], axes["num_blocks"]
    scales = repeated(head_rows.ROW_SCALES, num_tokens, generator.device)[:, None]
    qkvg = torch.randn((num_tokens, axes["qkvg_size"]), generator=generator, device=generator.device)
    made: dict[str, Tensor | float] = {
        "qkvg": (qkvg * scales).bfloat16(),
        "slot_mapping": head_rows.draw_slots(num_tokens, num_blocks, 3, generator),
        "kv_cache": head_rows.draw_cache(num_blocks, axes["num_kv_heads"], generator),
        "eps": 1e-5,
    }
    if specialization.statics["rope"]:
        made |= head_rows.draw_positions(num_tokens, axes["max_position"], generator)
    return made
