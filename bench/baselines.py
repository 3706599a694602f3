"""What else does the same work: cuBLAS through torch, plain Triton kernels, vLLM's own kernels where it is installed.

A baseline is checked against the kernel's reference before it is timed, so that it is known to do the same work.
"""

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import stock
from jitspark.spec import Specialization

Written = Mapping[str, torch.Tensor] | None  # outputs that are returned instead of written in place


@dataclass(frozen=True, slots=True)
class Baseline:
    """`call` takes the kernel's arguments by name.

    writes: which outputs it makes, where that is not all of them. differing: which share of integer outputs may differ,
    where a reciprocal is approximate. alike: what of integer outputs is compared, where two values mean the same.
    """

    name: str
    call: Callable[[Mapping[str, Any]], Written]
    writes: tuple[str, ...] | None = None
    differing: float = 0.0
    alike: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, output: output


def baselines(specialization: Specialization) -> list[Baseline]:
    """All that this machine has for the kernel's work."""
    found = []
    if specialization.name == "skinny_gemm_bf16":
        found.append(_cublas(specialization))
    if specialization.name == "router_gemm":
        found.append(Baseline("cuBLAS FP32, activations widened", _mm_wide))
    if importlib.util.find_spec("triton"):
        found += _in_triton(specialization)
    if importlib.util.find_spec("vllm"):
        found += _of_vllm(specialization)
    return found


def _cublas(specialization: Specialization) -> Baseline:
    if specialization.statics["epilogue"] == "silu_mul":
        return Baseline("cuBLAS + silu, mul", _mm_silu_mul)
    return Baseline("cuBLAS", _mm)


def _mm(values: Mapping[str, Any]) -> None:
    torch.mm(values["activation"], values["weight"].t(), out=values["out"])


def _mm_wide(values: Mapping[str, Any]) -> None:
    torch.mm(values["activation"].float(), values["weight"].t(), out=values["logits"])


def _mm_silu_mul(values: Mapping[str, Any]) -> None:
    gate, up = torch.mm(values["activation"], values["weight"].t()).chunk(2, dim=-1)
    torch.mul(torch.nn.functional.silu(gate), up, out=values["out"])


def _in_triton(specialization: Specialization) -> list[Baseline]:
    from bench import triton_kernels

    function = getattr(triton_kernels, specialization.name, None)
    statics = dict(specialization.statics)
    if function is None:
        return []
    warps = (1,) if specialization.name == "qk_rmsnorm_rope_paged_kv_append" else (8, 16)
    return [Baseline(f"Triton, {n} warps", partial(_call, function, statics, n)) for n in warps]


def _call(function: Callable[..., None], statics: dict[str, Any], num_warps: int, values: Mapping[str, Any]) -> None:
    function(values, statics, num_warps)


def _of_vllm(specialization: Specialization) -> list[Baseline]:
    makers = {
        "skinny_gemm_bf16": _vllm_silu_mul,
        "gated_residual_rmsnorm": _vllm_boundary,
        "qk_rmsnorm_rope_paged_kv_append": _vllm_append,
        "router_gemm": _vllm_router,
        "sigmoid_bias_topk_routing": _vllm_routing,
        "rmsnorm_nvfp4_quantize": _vllm_quantize,
        "expert_combine_rmsnorm": _vllm_combine,
    }
    maker = makers.get(specialization.name)
    try:
        made = maker(specialization) if maker else None
    except ImportError:
        return []
    return [made] if made else []


def _by_runtime(specialization: Specialization, *modules: str) -> Callable[[Mapping[str, Any]], None]:
    """What the runtime calls of vLLM for this operation, if vLLM has these modules: with our kernel's arguments."""
    operation = stock.runtime(*modules).stock_operations()["stock", specialization.name]

    def call(values: Mapping[str, Any]) -> None:
        operation(*values.values(), **specialization.statics)

    return call


def _vllm_silu_mul(specialization: Specialization) -> Baseline | None:
    if specialization.statics["epilogue"] != "silu_mul":
        return None
    stock.runtime().operator("silu_and_mul")
    return Baseline("cuBLAS + vLLM silu_and_mul", _by_runtime(specialization))


def _vllm_boundary(specialization: Specialization) -> Baseline | None:
    statics = specialization.statics
    if statics["mode"] != "backbone" or statics["write_tap"] or statics["write_router_input"]:
        return None  # it rounds nowhere in between and writes no copies
    from vllm.models.muse_spark.common.ops.fused_rmsnorm import fused_norm_residual_norm_fwd

    def call(values: Mapping[str, Any]) -> Written:
        activation, stream = fused_norm_residual_norm_fwd(
            values["branch"],
            values["stream"],
            values.get("post_weight"),
            values["weight"],
            values["post_eps"],
            values["eps"],
            alpha=values["alpha"],
            beta=values["beta"],
            post_gain_center=1.0 if "post_weight" in values else 0.0,
            pre_gain_center=statics["gain_center"],
            post_input_scale=statics["post_norm"] == "input_scale",
            out_dtype=torch.bfloat16,
        )
        return {"activation": activation, "stream": stream}

    return Baseline("vLLM fused_norm_residual_norm", call)


def _vllm_append(specialization: Specialization) -> Baseline | None:
    from vllm import _custom_ops as ops

    if not hasattr(ops, "fused_muse_spark_qknorm_rope_kv_insert") or not specialization.statics["rope"]:
        return None
    return Baseline("vLLM fused_muse_spark_qknorm_rope_kv_insert", _by_runtime(specialization))


def _vllm_router(specialization: Specialization) -> Baseline | None:
    """The shapes and numbers of tokens that the kernel is compiled for."""
    axes = specialization.axes
    if (axes["hidden_size"], axes["num_experts"]) != (8192, 256) or int(specialization.statics["max_tokens"]) > 32:
        return None

    stock.runtime().operator("fp32_router_gemm")
    return Baseline("vLLM fp32_router_gemm", _by_runtime(specialization))


def _vllm_routing(specialization: Specialization) -> Baseline:
    call = _by_runtime(specialization, "vllm.models.muse_spark.common.ops.fused_routing")
    return Baseline("vLLM Triton routing, no schedule", call, writes=("topk_ids", "topk_weights"))


def _vllm_quantize(_: Specialization) -> Baseline:
    from vllm.models.muse_spark.nvidia.ops.prepare_trtllm_nvfp4 import norm_quant_trtllm_nvfp4

    def call(values: Mapping[str, Any]) -> Written:
        tokens = values["x"].shape[0]
        codes, scales = norm_quant_trtllm_nvfp4(
            values["x"], tokens, values["weight"], values["eps"], 1.0, values["global_scale"]
        )
        return {"codes": codes, "scales": scales}

    return Baseline("vLLM Triton norm + quantize", call, differing=0.02, alike=_unsigned_zeros)


def _unsigned_zeros(name: str, output: torch.Tensor) -> torch.Tensor:
    """E2M1 codes, two a byte, with 0 for -0, which ours keeps where a block's scale vanishes."""
    if name != "codes":
        return output
    low, high = (code.masked_fill(code == 8, 0) for code in (output & 0xF, output >> 4))
    return low | (high << 4)


def _vllm_combine(specialization: Specialization) -> Baseline | None:
    """Whole rows only; which rows there are is computed once for each set of ids, outside of what is timed."""
    if specialization.axes["num_partials"] != 1:
        return None
    from vllm.models.muse_spark.common.ops.fused_finalize import fused_post_expert_finalize

    places: dict[int, torch.Tensor] = {}

    def call(values: Mapping[str, Any]) -> None:
        ids = values["topk_ids"]
        if ids.data_ptr() not in places:
            numbers = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device).view(ids.shape)
            places[ids.data_ptr()] = torch.where(ids < 0, -1, numbers)
        fused_post_expert_finalize(
            values["rows"].flatten(0, 2),
            values["weight"],
            values["topk_weights"],
            values["eps"],
            gain_center=1.0,
            weight_first=True,
            out=values["out"],
            permuted_idx=places[ids.data_ptr()],
        )

    return Baseline("vLLM Triton finalize", call)
