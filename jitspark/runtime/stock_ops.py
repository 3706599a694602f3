"""What vLLM runs for each operation of a plan, by ("stock", operation): for the provider `stock`, comparisons, benches.

An operation takes our kernel's arguments. Where vLLM cuts a part otherwise, the launches of that part share what lies
between them: attention runs where its partial results would be merged, experts where their rows would be combined, and
the launches before only note their tensors. So a part is stock as a whole or not at all. vLLM's NVFP4 experts on Hopper
(Marlin) read weights in an order of their own, which has as many bytes as ours. Raises ImportError for what is missing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from jitspark.runtime.stock_experts import Experts

HEAD_DIM = 64
BLOCK_SIZE = 16
ROUTER_TOKENS = 32  # vLLM's FP32 router kernel has these shapes: up to so many tokens, 8192 columns, 256 experts
ROUTER_SHAPE = (256, 8192)

Operation = Callable[..., object]


def stock_operations(experts: Experts | None = None) -> dict[tuple[str, str], Operation]:
    """Operations for one executor: what its launches note for each other is theirs alone, `experts` included."""
    attention, experts = _Attention(), experts or Experts()
    named: dict[str, Operation] = {
        "rmsnorm": experts.norm,
        "gated_residual_rmsnorm": gated_residual_rmsnorm,
        "skinny_gemm_bf16": skinny_gemm_bf16,
        "qk_rmsnorm_rope_paged_kv_append": qk_rmsnorm_rope_paged_kv_append,
        "paged_gqa_verify_attention": attention.note,
        "splitkv_combine_rmsnorm_sigmoid_gate": attention.run,
        "router_gemm": router_gemm,
        "sigmoid_bias_topk_routing": sigmoid_bias_topk_routing,
        "rmsnorm_nvfp4_quantize": experts.norm_for_nvfp4,
        "nvfp4_grouped_gemm_swiglu": experts.note_nvfp4_gate_up,
        "nvfp4_grouped_gemm_partial": experts.note_nvfp4_down,
        "bf16_grouped_gemm_swiglu": experts.note_bf16_gate_up,
        "bf16_grouped_gemm_partial": experts.note_bf16_down,
        "expert_combine_rmsnorm": experts.run,
        "expert_reduce_rmsnorm_combine": experts.run_and_exchange,
        "allgather_columns": allgather_columns,
        "allgather_gated_residual_rmsnorm": allgather_gated_residual_rmsnorm,
        "allreduce_gated_residual_rmsnorm": allreduce_gated_residual_rmsnorm,
        "logits_softcap": logits_softcap,
    }
    return {("stock", name): operation for name, operation in named.items()}


def skinny_gemm_bf16(activation: Tensor, weight: Tensor, out: Tensor, *, epilogue: str, **_: Any) -> None:
    """cuBLAS, and vLLM's activation behind it."""
    if epilogue == "store":
        torch.mm(activation, weight.t(), out=out)
        return
    operator("silu_and_mul")(out, torch.mm(activation, weight.t()))


def gated_residual_rmsnorm(
    branch: Tensor, stream: Tensor, *rest: Any, post_norm: str, gain_center: float, write_tap: bool, **statics: Any
) -> None:
    """The Triton boundary, with the stream updated in place: its function would return another tensor."""
    from vllm.models.muse_spark.common.ops.fused_rmsnorm import _norm_residual_norm_fwd_kernel as kernel

    assert statics["mode"] == "backbone" and not statics["write_router_input"]
    remaining = list(rest)
    post_weight = remaining.pop(0) if post_norm == "input_scale" else None
    alpha, beta, weight, activation, *copies, post_eps, eps = remaining
    rows, width = branch.shape
    wide = 1 << (width - 1).bit_length()
    tile_rows = max(1, 8192 // wide)
    kernel[(-(-rows // tile_rows),)](
        branch, stream, stream, activation, branch if post_weight is None else post_weight, weight, alpha, beta, rows,
        D=width, post_eps=post_eps, pre_eps=eps, post_gain_center=0.0 if post_weight is None else 1.0,
        pre_gain_center=gain_center, alpha_scalar=1.0, POST_HAS_WEIGHT=post_weight is not None,
        POST_INPUT_SCALE=post_weight is not None, PRE_HAS_WEIGHT=True, PRE_INPUT_SCALE=False, GATE_STREAM=True,
        PER_CHANNEL=True, bT=tile_rows, bD=wide, num_warps=32 if wide >= 8192 else 16 if wide >= 4096 else 8,
    )  # fmt: skip
    if write_tap:
        copies[0].copy_(stream)


def allgather_columns(shard: Tensor, *rest: Any, **_: Any) -> None:
    """A copy of this rank's columns into every rank's place: what a rank alone can do of a gather."""
    out = rest[4]
    out.view(len(shard), -1, shard.shape[1]).copy_(shard[:, None])


def allgather_gated_residual_rmsnorm(shard: Tensor, *rest: Any, **statics: Any) -> None:
    """That copy, then the boundary: vLLM without FlashInfer's fused collectives launches both."""
    _, _, _, _, stream, *others = rest
    *tensors, _rank, _timeout, post_eps, eps = others
    branch = torch.empty(stream.shape, dtype=shard.dtype, device=shard.device)
    branch.view(len(shard), -1, shard.shape[1]).copy_(shard[:, None])
    gated_residual_rmsnorm(branch, stream, *tensors, post_eps, eps, **statics)


def allreduce_gated_residual_rmsnorm(partial: Tensor, *rest: Any, **statics: Any) -> None:
    """A copy in the place of the sum over ranks, then the boundary."""
    stream, *others = rest[2 + 2 * statics["shots"] :]  # behind an inbox and its peers for each shot, epochs, failure
    *tensors, _rank, _timeout, post_eps, eps = others
    gated_residual_rmsnorm(partial.clone(), stream, *tensors, post_eps, eps, **statics)


def qk_rmsnorm_rope_paged_kv_append(qkvg: Tensor, *rest: Any, rope: bool) -> None:
    """The fused operator of vLLM; without RoPE it is given no table, and slots in the place of positions."""
    from vllm import _custom_ops

    *table, slot_mapping, kv_cache, eps = rest
    kv_heads = kv_cache.shape[1]
    heads = qkvg.shape[1] // (2 * HEAD_DIM) - kv_heads
    _custom_ops.fused_muse_spark_qknorm_rope_kv_insert(
        qkvg,
        table[0] if rope else slot_mapping,
        heads,
        kv_heads,
        HEAD_DIM,
        eps,
        cos_sin_cache=table[1] if rope else None,
        rotary_dim=HEAD_DIM if rope else 0,
        slot_mapping=slot_mapping,
        kv_cache=kv_cache,
        block_size=BLOCK_SIZE,
    )


def router_gemm(activation: Tensor, weight: Tensor, logits: Tensor, **_: Any) -> None:
    """The FP32 router kernel where it has the shape, else an FP32 product."""
    if tuple(weight.shape) == ROUTER_SHAPE and len(activation) <= ROUTER_TOKENS:
        operator("fp32_router_gemm")(logits, activation, weight)
    else:
        torch.mm(activation.float(), weight.t(), out=logits)


def sigmoid_bias_topk_routing(logits: Tensor, bias: Tensor, *rest: Any, padded: bool, **_: Any) -> None:
    """The Triton routing. It makes no schedule: vLLM's experts make their own from the ids."""
    from vllm.models.muse_spark.common.ops.fused_routing import fused_musespark1x_routing

    *mask, topk_ids, topk_weights, _ids, _offsets, _routes, _distinct = rest
    fused_musespark1x_routing(
        logits,
        bias,
        topk_ids.shape[1],
        1.0,
        router_score_division_eps=1e-15,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        is_padding=mask[0].view(torch.bool) if padded else None,
    )


def logits_softcap(logits: Tensor, out: Tensor, multiplier: float, cap: float, **_: Any) -> None:
    operator("muse_spark_mul_tanh_soft_cap")(out, logits, multiplier, cap)


def operator(name: str) -> Operation:
    """An operator of vLLM's main extension. Raises ImportError for one that this build has not."""
    from vllm import _custom_ops  # noqa: F401 - registers the operators

    found: Operation | None = getattr(getattr(torch.ops, "_C"), name, None)  # noqa: B009 - vLLM's namespace
    if found is None:
        raise ImportError(f"no operator {name} in this vLLM")
    return found


def query_starts(tokens: int, requests: int, device: torch.device) -> Tensor:
    """Where each request's rows of the queries begin, and where the last ones end: every request has as many."""
    return torch.arange(0, tokens + 1, tokens // requests, dtype=torch.int32, device=device)


def flash_attention(
    query: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    *,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> None:
    """FA3 of `query` [tokens, heads, 64] over the paged cache [blocks, KV heads, 16, K | V] into `out`.

    `starts` as `query_starts` makes them; no request has more than `longest` keys; `window` 0 is none.
    """
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    by_token = kv_cache.transpose(1, 2)
    flash_attn_varlen_func(
        query,
        by_token[..., :HEAD_DIM],
        by_token[..., HEAD_DIM:],
        len(query) // len(seq_lens),
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


class _Attention:
    """FA3 over the paged cache where splits would be merged, then the gated norm, in place."""

    def __init__(self) -> None:
        self._noted: tuple[Any, ...] = ()
        self._starts: dict[int, Tensor] = {}

    def note(
        self, qkvg: Tensor, kv_cache: Tensor, block_table: Tensor, seq_lens: Tensor, *rest: Any, **statics: Any
    ) -> None:
        softmax_scale = rest[-1]
        if len(seq_lens) not in self._starts:  # before any capture: the first run of a plan is eager
            self._starts[len(seq_lens)] = query_starts(len(qkvg), len(seq_lens), qkvg.device)
        self._noted = (qkvg, kv_cache, block_table, seq_lens, softmax_scale, statics["sliding_window"])

    def run(self, *rest: Any, **_: Any) -> None:
        from vllm.third_party.flash_linear_attention.ops.fused_norm_gate import rms_norm_gated

        _max, _sum, _out, qkvg, out, eps = rest
        noted, kv_cache, block_table, seq_lens, scale, window = self._noted
        assert noted is qkvg, "the launches of a layer's attention belong together"
        rows, width = out.shape
        heads = out.view(rows, -1, HEAD_DIM)
        flash_attention(
            qkvg[:, :width].view(rows, -1, HEAD_DIM),
            kv_cache,
            block_table,
            seq_lens,
            heads,
            starts=self._starts[len(seq_lens)],
            longest=block_table.shape[1] * BLOCK_SIZE,
            scale=scale,
            window=window,
        )
        gate = qkvg[:, -width:].view(rows, -1, HEAD_DIM)
        rms_norm_gated(heads, gate, None, None, "sigmoid", eps=eps)
