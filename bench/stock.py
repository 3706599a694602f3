"""vLLM's own kernels for the parts of a step, each found by import: ImportError says that this machine lacks it.

The callables take tensors in vLLM's layouts, which `bench` makes from the same values that our kernels get. What the
runtime calls for a plan's operations is called through it.
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def runtime(*modules: str) -> Any:
    """`jitspark.runtime.stock_ops`, where vLLM has these modules of its own.

    vLLM comes first: it brings msgspec along, which the runtime needs and a machine without vLLM may lack.
    """
    for module in ("vllm", *modules):
        importlib.import_module(module)
    from jitspark.runtime import stock_ops

    return stock_ops


def flash_attention(
    query: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, out: Tensor, scale: float, window: int
) -> Callable[[], object]:
    """FA3 over the paged cache [blocks, KV heads, 16, K | V], every request with as many rows."""
    from vllm.vllm_flash_attn.flash_attn_interface import is_fa_version_supported

    if not is_fa_version_supported(3):
        raise ImportError("no FlashAttention 3")
    stock_ops = runtime()
    sizes = {
        "starts": stock_ops.query_starts(len(query), len(seq_lens), query.device),
        "longest": int(seq_lens.max()),
        "scale": scale,
        "window": window,
    }
    return lambda: stock_ops.flash_attention(query, kv_cache, block_table, seq_lens, out, **sizes)


def marlin_experts(
    weights: dict[str, Tensor], hidden: Tensor, topk_weights: Tensor, topk_ids: Tensor
) -> Callable[[], Tensor]:
    """Marlin's NVFP4 experts, its own schedule included, without weighting and summing: a row per route."""
    runtime("vllm.model_executor.layers.fused_moe.experts.marlin_moe")
    from jitspark.runtime.stock_experts import marlin_rows

    first, second = (tuple(weights[name + kind] for kind in ("", "_scale", "_scale_2")) for name in ("w13", "w2"))
    return lambda: marlin_rows(hidden, first, second, topk_ids, topk_weights)


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
    """The FP32 router kernel for the shapes that it has (8192 to 256, up to 32 tokens), else an FP32 product."""
    stock_ops = runtime()
    stock_ops.operator("fp32_router_gemm")
    return lambda: stock_ops.router_gemm(hidden, weight, out)


def soft_cap(logits: Tensor, out: Tensor, multiplier: float, cap: float) -> Callable[[], object]:
    stock_ops = runtime()
    stock_ops.operator("muse_spark_mul_tanh_soft_cap")
    return lambda: stock_ops.logits_softcap(logits, out, multiplier, cap)
