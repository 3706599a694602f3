"""A layer's attention in a step, backbone or draft: norms, RoPE and append, attention over the paged cache, merge.

A layer has a KV cache, a block table and a slot mapping of its own, whose sizes and strides are known at binding: vLLM
puts layers into groups with tables of their own.
"""

import math

from jitspark.geometry import Decoder
from jitspark.plans import backbone_weights as weights
from jitspark.plans.builder import PlanBuilder
from jitspark.plans.plan import CUTE, Kind
from kernel_specs.paged_gqa_verify_attention import spec as paged_gqa_verify_attention
from kernel_specs.qk_rmsnorm_rope_paged_kv_append import spec as qk_rmsnorm_rope_paged_kv_append
from kernel_specs.splitkv_combine_rmsnorm_sigmoid_gate import spec as splitkv_combine_rmsnorm_sigmoid_gate

PART = "attention"
PARTIALS = ("partial_max", "partial_sum", "partial_out")


class AttentionLaunches:
    """Adds layers' attention to a plan: `qkvg` in, `attention_output` out.

    The plan's inputs are `seq_lens` [requests], `positions` [rows] where a layer uses RoPE, and for the layer `at` its
    `{at}.kv_cache`, `{at}.block_table` and `{at}.slot_mapping`.
    """

    def __init__(self, builder: PlanBuilder, decoder: Decoder, tp: int, rows: int, query_length: int) -> None:
        self._builder, self._decoder, self._tp, self._rows, self._length = builder, decoder, tp, rows, query_length
        self._requests = rows // query_length
        builder.buffer("seq_lens", Kind.INPUT, (self._requests,), "int32")

    def add(self, at: str, *, rope: bool, window: int) -> None:
        """The layer `at`, with its window in keys, the query's own included, or 0."""
        self._append(at, rope=rope)
        self._attend(at, window)

    def _append(self, at: str, *, rope: bool) -> None:
        attention, build = self._decoder.attention, self._builder
        shape = (f"{at}.num_blocks", attention.key_value_heads(self._tp), attention.block_size, 2 * attention.head_dim)
        strides = (f"{at}.block_stride", f"{at}.head_stride", f"{at}.token_stride", 1)
        cache = build.buffer(f"{at}.kv_cache", Kind.KV_CACHE, shape, "bfloat16", strides=strides)
        slots = build.buffer(f"{at}.slot_mapping", Kind.INPUT, (self._rows,), "int64")
        if rope:
            build.buffer("positions", Kind.INPUT, (self._rows,), "int64")
        build.launch(
            f"{at}.append",
            PART,
            qk_rmsnorm_rope_paged_kv_append.serving(attention, self._tp, rope=rope),
            {
                "qkvg": "qkvg",
                **({"positions": "positions", "cos_sin": weights.rope_table()} if rope else {}),
                "slot_mapping": slots,
                "kv_cache": cache,
                "eps": self._decoder.norms.rms_norm_eps,
            },
            **({"max_position": "max_positions"} if rope else {}),
        )

    def _attend(self, at: str, window: int) -> None:
        """Over the paged cache, split and merged. Another provider has no splits to merge: one, whose maximum is 0."""
        attention, build = self._decoder.attention, self._builder
        heads = attention.key_value_heads(self._tp)
        splits = paged_gqa_verify_attention.num_splits(self._requests, heads, self._length, window)
        shape = (self._requests, f"{at}.max_blocks")
        table = build.buffer(f"{at}.block_table", Kind.INPUT, shape, "int32", strides=(f"{at}.table_stride", 1))
        kind = "windowed" if window else "full"  # of another size
        partials = {name: f"{kind}.{name}" for name in PARTIALS}
        build.launch(
            f"{at}.attention",
            PART,
            paged_gqa_verify_attention.serving(attention, self._tp, self._length, window),
            {
                "qkvg": "qkvg",
                "kv_cache": f"{at}.kv_cache",
                "block_table": table,
                "seq_lens": "seq_lens",
                **partials,
                "softmax_scale": self._decoder.qk_scale_factor / math.sqrt(attention.head_dim),
            },
            num_splits=splits if build.provider(PART) == CUTE else 1,
        )
        build.launch(
            f"{at}.merge",
            PART,
            splitkv_combine_rmsnorm_sigmoid_gate.serving(attention, self._tp),
            {**partials, "qkvg": "qkvg", "out": "attention_output", "eps": self._decoder.norms.rms_norm_eps},
        )
