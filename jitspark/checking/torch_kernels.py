"""Plain torch in working precision for some operations: an implementation beside kernels and references.

They round where torch rounds, within an ulp of what the specs say, and run anywhere: what `jitspark compare` holds
against the references on a machine without a GPU.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def skinny_gemm_bf16(activation: Tensor, weight: Tensor, out: Tensor, *, epilogue: str, **_: Any) -> None:
    product = torch.nn.functional.linear(activation, weight)
    if epilogue == "silu_mul":
        gate, up = product.float().chunk(2, dim=-1)
        product = torch.nn.functional.silu(gate) * up
    out.copy_(product)


def rmsnorm(x: Tensor, *rest: Any, weighted: bool, gain_center: float, round_input: bool, **_: Any) -> None:
    *weight, out, eps = rest
    normed = _normed((x.bfloat16() if round_input else x).float(), eps)
    out.copy_(normed * (weight[0].float() + gain_center) if weighted else normed)


def gated_residual_rmsnorm(
    branch: Tensor, stream: Tensor, *rest: Any, post_norm: str, gain_center: float, write_tap: bool, **statics: Any
) -> None:
    assert statics["mode"] == "backbone" and not statics["write_router_input"]
    remaining = list(rest)
    scaled = branch.float()
    if post_norm == "input_scale":
        scaled = scaled * (remaining.pop(0).float() + 1.0)
    alpha, beta, weight, activation, *copies, post_eps, eps = remaining
    stream.copy_(alpha * stream + beta * _normed(scaled, post_eps))
    if write_tap:
        copies[0].copy_(stream)
    activation.copy_(_normed(stream, eps) * (weight.float() + gain_center))


def router_gemm(activation: Tensor, weight: Tensor, logits: Tensor, **_: Any) -> None:
    torch.mm(activation.float(), weight.t(), out=logits)


def logits_softcap(logits: Tensor, out: Tensor, multiplier: float, cap: float, **_: Any) -> None:
    out.copy_(cap * torch.tanh(logits.float() * (multiplier / cap)))


def _normed(values: Tensor, eps: float) -> Tensor:
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)


TORCH_KERNELS: Mapping[str, Callable[..., None]] = {
    each.__name__: each for each in (skinny_gemm_bf16, rmsnorm, gated_residual_rmsnorm, router_gemm, logits_softcap)
}
