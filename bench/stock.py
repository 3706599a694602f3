"""vLLM's own kernels for the parts of a step, each found by import: ImportError says that this machine lacks it.

The callables take tensors in vLLM's layouts, which `bench` makes from the same values that our kernels get.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

BLOCK_SIZE = 16
HEAD_DIM = 64


def operators(*names: str) -> Sequence[Any]:
    """Compiled operators of vLLM's main extension. Raises ImportError for what this build has not."""
    from vllm import _custom_ops  # noqa: F401 - registers them

    space = getattr(torch.ops, "_C")  # noqa: B009 - vLLM's namespace for its operators
    missing = [name for name in names if not hasattr(space, name)]
    if missing:
        raise ImportError(f"no operator {', '.join(missing)}")
    return [getattr(space, name) for name in names]


def flash_attention(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor, scale: float, window: int
) -> Callable[[], object]:
    """FA3 over the paged cache [blocks, KV heads, 16, K | V], every request with as many rows."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func, is_fa_version_supported

    if not is_fa_version_supported(3):
        raise ImportError("no FlashAttention 3")
    requests = len(seq_lens)
    rows = len(query) // requests
    starts = torch.arange(0, len(query) + 1, rows, dtype=torch.int32, device=query.device)
    by_token = kv_cache.transpose(1, 2)
    longest = int(seq_lens.max())

    def call() -> object:
        return flash_attn_varlen_func(
            query,
            by_token[..., :HEAD_DIM],
            by_token[..., HEAD_DIM:],
            rows,
            starts,
            longest,
            seqused_k=seq_lens,
            softmax_scale=scale,
            causal=True,
            window_size=[window - 1, 0] if window else None,
            block_table=block_table,
            out=out,
            fa_version=3,
        )

    return call


def marlin_experts(
    weights: dict[str, Tensor], hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> Callable[[], Tensor]:
    """Marlin's NVFP4 experts, its own schedule included, without weighting and summing: a row per route."""
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    def rows_as_they_are(rows: Tensor, *_: Any) -> Tensor:
        return rows

    def call() -> Tensor:
        made: Tensor = fused_marlin_moe(
            hidden,
            weights["w13"],
            weights["w2"],
            None,
            None,
            weights["w13_scale"],
            weights["w2_scale"],
            topk_weights,
            topk_ids,
            scalar_types.float4_e2m1f.id,
            global_num_experts=len(weights["w13"]),
            global_scale1=weights["w13_scale_2"],
            global_scale2=weights["w2_scale_2"],
            moe_sum=rows_as_they_are,
            mul_topk_weights_in_gemm2=False,
        )
        return made

    return call


def marlin_weights(plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """NVFP4 experts as a checkpoint has them, in Marlin's order. `plain`: w13, w2, their scales and second scales."""
    from types import SimpleNamespace

    from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_nvfp4_moe_layer_for_marlin

    layer: Any = SimpleNamespace(
        num_experts=len(plain["w13"]),
        hidden_size=plain["w13"].shape[2] * 2,
        intermediate_size_per_partition=plain["w2"].shape[2] * 2,
        params_dtype=torch.bfloat16,
    )
    names = ("w13", "w13_scale", "w13_scale_2", "w2", "w2_scale", "w2_scale_2")
    made = prepare_nvfp4_moe_layer_for_marlin(layer, *(plain[name] for name in names), is_act_and_mul=True)
    return dict(zip(names, made, strict=True))


def triton_experts(
    w13: Tensor, w2: Tensor, hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> Callable[[], Tensor]:
    """The Triton experts in BF16, schedule and weighted sum included."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    def call() -> Tensor:
        made: Tensor = fused_experts(hidden, w13, w2, topk_weights, topk_ids)
        return made

    return call


def router(hidden: Tensor, weight: Tensor, out: Tensor) -> Callable[[], object]:
    """The FP32 router kernel, for the shapes that vLLM has it for (8192 to 256, up to 32 tokens)."""
    (gemm,) = operators("fp32_router_gemm")
    return lambda: gemm(out, hidden, weight)


def soft_cap(logits: Tensor, out: Tensor, multiplier: float, cap: float) -> Callable[[], object]:
    (capped,) = operators("muse_spark_mul_tanh_soft_cap")
    return lambda: capped(out, logits, multiplier, cap)
