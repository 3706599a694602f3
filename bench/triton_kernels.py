"""Baselines in Triton for work that no library call does in one launch: one program per row, or per token and head.

Rows are powers of two, as the models' hidden sizes are.
"""

# ruff: noqa: ANN001, ANN202, N803, PLR0917 - device code: Triton gives meaning to annotations and to capital names

from collections.abc import Mapping
from typing import Any

import triton
import triton.language as tl


@triton.jit
def _rmsnorm(
    x, weight, out, eps, SIZE: tl.constexpr, WEIGHTED: tl.constexpr, CENTER: tl.constexpr, ROUND: tl.constexpr
):
    columns = tl.arange(0, SIZE)
    row = tl.program_id(0) * SIZE
    values = tl.load(x + row + columns).to(tl.float32)
    if ROUND:
        values = values.to(tl.bfloat16).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values) / SIZE + eps)
    if WEIGHTED:
        normed = normed * (tl.load(weight + columns).to(tl.float32) + CENTER)
    tl.store(out + row + columns, normed.to(tl.bfloat16))


@triton.jit
def _boundary(
    branch, stream, post_weight, alpha, beta, weight, activation, tap, router_input, post_eps, eps,
    SIZE: tl.constexpr, DRAFT: tl.constexpr, SCALED: tl.constexpr, CENTER: tl.constexpr,
    TAP: tl.constexpr, ROUTER: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, SIZE)
    row = tl.program_id(0) * SIZE
    z = tl.load(branch + row + columns).to(tl.float32)
    if SCALED:
        z = z * (tl.load(post_weight + columns).to(tl.float32) + 1.0)
    y = z * tl.rsqrt(tl.sum(z * z) / SIZE + post_eps)
    if DRAFT:
        y = y.to(tl.bfloat16).to(tl.float32)
    x = tl.load(alpha + columns) * tl.load(stream + row + columns) + tl.load(beta + columns) * y
    tl.store(stream + row + columns, x)
    if TAP:
        tl.store(tap + row + columns, x)
    if DRAFT:
        x = x.to(tl.bfloat16).to(tl.float32)
    gain = tl.load(weight + columns).to(tl.float32) + CENTER
    normed = x * tl.rsqrt(tl.sum(x * x) / SIZE + eps) * gain
    tl.store(activation + row + columns, normed.to(tl.bfloat16))
    if ROUTER:
        tl.store(router_input + row + columns, normed)


@triton.jit
def _append(
    qkvg, positions, cos_sin, slot_mapping, kv_cache, eps,
    row_stride, block_stride, head_stride, token_stride, num_heads, num_kv_heads, ROPE: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    pair = tl.arange(0, 32)
    source = qkvg + token * row_stride + head * 64 + 2 * pair
    even, odd = tl.load(source).to(tl.float32), tl.load(source + 1).to(tl.float32)
    first_value = num_heads + num_kv_heads
    if head < first_value:
        scale = tl.rsqrt(tl.sum(even * even + odd * odd) / 64 + eps)
        even, odd = even * scale, odd * scale
        if ROPE:
            row = cos_sin + tl.load(positions + token) * 64 + pair
            cosine, sine = tl.load(row), tl.load(row + 32)
            even, odd = even * cosine - odd * sine, even * sine + odd * cosine
        tl.store(source, even.to(tl.bfloat16))
        tl.store(source + 1, odd.to(tl.bfloat16))
    slot = tl.load(slot_mapping + token)
    if (head >= num_heads) & (slot >= 0):
        is_value = head >= first_value
        kv_head = tl.where(is_value, head - first_value, head - num_heads)
        place = slot // 16 * block_stride + kv_head * head_stride + slot % 16 * token_stride
        target = kv_cache + place + tl.where(is_value, 64, 0) + 2 * pair
        tl.store(target, even.to(tl.bfloat16))
        tl.store(target + 1, odd.to(tl.bfloat16))


def rmsnorm(values: Mapping[str, Any], statics: Mapping[str, Any], num_warps: int) -> None:
    x, out = values["x"], values["out"]
    _rmsnorm[(x.shape[0],)](
        x, values.get("weight", x), out, values["eps"], x.shape[1],
        statics["weighted"], statics["gain_center"], statics["round_input"], num_warps=num_warps,
    )  # fmt: skip


def gated_residual_rmsnorm(values: Mapping[str, Any], statics: Mapping[str, Any], num_warps: int) -> None:
    branch, unused = values["branch"], values["alpha"]
    _boundary[(branch.shape[0],)](
        branch, values["stream"], values.get("post_weight", unused), values["alpha"], values["beta"], values["weight"],
        values["activation"], values.get("tap", unused), values.get("router_input", unused),
        values["post_eps"], values["eps"], branch.shape[1], statics["mode"] == "draft",
        statics["post_norm"] == "input_scale", statics["gain_center"], statics["write_tap"],
        statics["write_router_input"], num_warps=num_warps,
    )  # fmt: skip


def qk_rmsnorm_rope_paged_kv_append(values: Mapping[str, Any], statics: Mapping[str, Any], num_warps: int) -> None:
    qkvg, cache, slots = values["qkvg"], values["kv_cache"], values["slot_mapping"]
    num_kv_heads = cache.shape[1]
    num_heads = qkvg.shape[1] // 128 - num_kv_heads
    _append[(qkvg.shape[0], num_heads + 2 * num_kv_heads)](
        qkvg, values.get("positions", slots), values.get("cos_sin", qkvg), slots, cache, values["eps"],
        qkvg.stride(0), *cache.stride()[:3], num_heads, num_kv_heads, statics["rope"], num_warps=num_warps,
    )  # fmt: skip
