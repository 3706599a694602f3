"""What vLLM runs for the draft's operations where it rounds otherwise than the backbone, and for its context rows.

In the form of runtime.stock_ops, on top of which it stands: by ("stock", operation), with our kernels' arguments. fc is
whole on every rank, as vLLM holds it, and so is lm_head's product after its gather.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.runtime.stock_ops import stock_operations

HEAD_DIM = 64

Operation = Callable[..., object]


def draft_operations(whole_fc: Tensor | None = None) -> Mapping[tuple[str, str], Operation]:
    """Operations for one executor; `whole_fc` [hidden, taps] takes the place of the rank's share of it."""
    combine = _Combine(whole_fc)
    named: dict[str, Operation] = {
        "rmsnorm": rmsnorm,
        "gated_residual_rmsnorm": gated_residual_rmsnorm,
        "allreduce_gated_residual_rmsnorm": allreduce_gated_residual_rmsnorm,
        "context_rmsnorm": context_rmsnorm,
        "grouped_skinny_gemm_bf16": grouped_skinny_gemm_bf16,
        "context_kv_precompute_append": context_kv_precompute_append,
    }
    if whole_fc is not None:
        named |= {"skinny_gemm_bf16": combine.multiply, "allgather_columns": combine.keep}
    return {**stock_operations(), **{("stock", name): operation for name, operation in named.items()}}


class _Combine:
    """The whole product where a rank would make its share, kept where that would be gathered."""

    def __init__(self, whole_fc: Tensor | None) -> None:
        self._weight, self._made = whole_fc, None

    def multiply(self, activation: Tensor, *_: Any, **__: Any) -> None:
        assert self._weight is not None
        self._made = torch.mm(activation, self._weight.t())

    def keep(self, _: Tensor, *rest: Any, **__: Any) -> None:
        rest[4].copy_(self._made)  # vLLM copies it into its buffer of hidden states too


def rmsnorm(x: Tensor, weight: Tensor, out: Tensor, eps: float, *, gain_center: float, **_: Any) -> None:
    """The stream rounded, then the Triton norm."""
    _norm(x.to(torch.bfloat16), weight, eps, gain_center=gain_center, out=out)


def gated_residual_rmsnorm(
    branch: Tensor, stream: Tensor, *rest: Any, post_norm: str, gain_center: float, **statics: Any
) -> None:
    """The draft's boundary as its layers run it: a norm, four elementwise kernels, the stream rounded, a norm."""
    assert statics["mode"] == "draft"
    remaining = list(rest)
    post_weight = remaining.pop(0) if post_norm == "input_scale" else None
    alpha, beta, weight, activation, post_eps, eps = remaining
    scaled = post_weight is not None
    y = _norm(branch, post_weight, post_eps, gain_center=1.0 if scaled else 0.0, input_scale=scaled)
    torch.mul(alpha, stream, out=stream)
    stream.add_(beta * y.to(stream.dtype))
    _norm(stream.to(torch.bfloat16), weight, eps, gain_center=gain_center, out=activation)


def allreduce_gated_residual_rmsnorm(partial: Tensor, *rest: Any, **statics: Any) -> None:
    """A copy in the place of the sum over ranks, then the boundary."""
    stream, *others = rest[2 + 2 * statics["shots"] :]  # behind an inbox and its peers for each shot, epochs, failure
    *tensors, _rank, _timeout, post_eps, eps = others
    gated_residual_rmsnorm(partial.clone(), stream, *tensors, post_eps, eps, **statics)


def context_rmsnorm(
    context: Tensor, weight: Tensor, layer_weights: Tensor, out: Tensor, eps: float, *, gain_center: float, **_: Any
) -> None:
    hidden = _norm(context, weight, eps, gain_center=gain_center)
    torch.stack([_norm(hidden, each, eps, gain_center=gain_center) for each in layer_weights], out=out)


def grouped_skinny_gemm_bf16(activation: Tensor, weight: Tensor, out: Tensor, **_: Any) -> None:
    """One batched product; it leaves layers outermost, which the store then expects of `out`'s memory."""
    groups, rows, _ = activation.shape
    torch.bmm(activation, weight.transpose(1, 2), out=out.view(groups, rows, -1))


def context_kv_precompute_append(kv: Tensor, *rest: Any, rope: bool, num_layers: int) -> None:
    """Keys and values apart, the norm in torch, the operator of RoPE with a BF16 table, a store for each layer."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.flash_attn import reshape_and_cache_flash

    *table, eps = rest
    slots, caches = table[-2 * num_layers : -num_layers], table[-num_layers:]
    rows, heads = len(kv), kv.shape[1] // (2 * num_layers * HEAD_DIM)
    keys, values = kv.view(num_layers, rows, 2, heads, HEAD_DIM).permute(2, 0, 1, 3, 4).contiguous()
    wide = keys.float()
    normed = (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)).to(keys.dtype)
    if rope:
        positions, cos_sin = table[:2]
        flat = normed.view(num_layers * rows, heads, HEAD_DIM)
        repeated = positions.repeat(num_layers)
        _custom_ops.rotary_embedding(repeated, flat, None, HEAD_DIM, _rounded(cos_sin), is_neox=False)
    one = _one(kv.device)
    for layer in range(num_layers):
        key_cache, value_cache = caches[layer].transpose(1, 2).split(HEAD_DIM, dim=-1)
        reshape_and_cache_flash(normed[layer], values[layer], key_cache, value_cache, slots[layer], "auto", one, one)


@functools.cache
def _one(device: torch.device) -> Tensor:
    """A scale that scales nothing; made in the first run, which is eager."""
    return torch.ones((), dtype=torch.float32, device=device)


_TABLES: dict[int, Tensor] = {}  # vLLM rounds a table once and keeps that


def _rounded(table: Tensor) -> Tensor:
    return _TABLES.setdefault(table.data_ptr(), table.to(torch.bfloat16))


def _norm(x: Tensor, weight: Tensor | None, eps: float, **options: Any) -> Tensor:
    from vllm.models.muse_spark.common.ops.fused_rmsnorm import fused_rmsnorm_fwd

    made: Tensor = fused_rmsnorm_fwd(x, weight, eps, **options)
    return made
