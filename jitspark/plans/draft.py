"""The plans of a DSpark draft: its forward over query rows, and the keys and values of the rows that it takes over.

The draft rounds where the backbone does not: its stream before each norm, and what a post norm makes before it is
blended. Several ranks exchange inside the kernels: the residual boundaries behind o_proj and down, and fc's columns.
Embedding is outside, as is the sampling loop. Weights are named as in vLLM's draft model.
"""

from collections.abc import Mapping

from jitspark.geometry import Deployment, Draft
from jitspark.plans import backbone_weights as weights
from jitspark.plans.attention_launches import AttentionLaunches
from jitspark.plans.builder import Given, Header, Keys, PlanBuilder, Weight
from jitspark.plans.exchange_launches import exchange_of, gather_columns
from jitspark.plans.plan import Kind, Plan, Stage
from jitspark.plans.plan import WeightSource as Source
from kernel_specs.allreduce_gated_residual_rmsnorm import spec as allreduce_gated_residual_rmsnorm
from kernel_specs.context_kv_precompute_append import spec as context_kv_precompute_append
from kernel_specs.context_rmsnorm import spec as context_rmsnorm
from kernel_specs.gated_residual_rmsnorm import spec as gated_residual_rmsnorm
from kernel_specs.grouped_skinny_gemm_bf16 import spec as grouped_skinny_gemm_bf16
from kernel_specs.rmsnorm import spec as rmsnorm
from kernel_specs.skinny_gemm_bf16 import spec as skinny_gemm_bf16

NORM, PROJECTION, ATTENTION, EXCHANGE = "boundary_norm", "projection", "attention", "all_reduce"


def draft_plan(
    deployment: Deployment,
    rows: int,
    target: str,
    *,
    rope: bool | None = None,
    providers: Mapping[str, str] | None = None,
    keys: Keys | None = None,
) -> Plan:
    """The draft's forward for `rows` query rows: from their embeddings to the final norm's output.

    `rope`: whether its layers use RoPE, all or none; None is what the geometry says. `providers` names who serves a
    part instead of our kernels. Raises SpecError for rows that no kernel serves.
    """
    draft = deployment.draft
    header = _header(Stage.DRAFT, deployment, draft.num_speculative_tokens, rows, target, providers)
    step = _Forward(deployment, PlanBuilder(header, keys), rope=uses_rope(draft) if rope is None else rope)
    step.begin()
    for layer in range(draft.num_hidden_layers):
        step.attention(layer)
        step.feed_forward(layer)
    return step.builder.plan()


def context_plan(
    deployment: Deployment,
    rows: int,
    target: str,
    *,
    rope: bool | None = None,
    from_taps: bool = False,
    providers: Mapping[str, str] | None = None,
    keys: Keys | None = None,
) -> Plan:
    """Keys and values of `rows` context rows in the cache of every draft layer.

    They start from `context` [rows, hidden_size], what `combine_plan` makes; with `from_taps` that is part of the plan,
    which starts where it does. Raises SpecError as `draft_plan`.
    """
    draft = deployment.draft
    header = _header(Stage.DRAFT_CONTEXT, deployment, deployment.query_length, rows, target, providers)
    builder = PlanBuilder(header, keys)
    if from_taps:
        _combine(builder, deployment)
    else:
        builder.buffer("context", Kind.INPUT, (rows, draft.hidden_size), "bfloat16")
    _project_context(builder, deployment)
    _append_context(builder, deployment, rope=uses_rope(draft) if rope is None else rope)
    return builder.plan()


def combine_plan(
    deployment: Deployment,
    rows: int,
    target: str,
    *,
    providers: Mapping[str, str] | None = None,
    keys: Keys | None = None,
) -> Plan:
    """`context` [rows, hidden_size], whole on every rank: fc of `taps` [rows, fc_width], the tapped streams together.

    vLLM keeps what it makes, for a moment, in a buffer of its own. Raises SpecError as `draft_plan`.
    """
    header = _header(Stage.DRAFT_CONTEXT, deployment, deployment.query_length, rows, target, providers)
    builder = PlanBuilder(header, keys)
    builder.buffer("context", Kind.OUTPUT, (rows, deployment.draft.hidden_size), "bfloat16")
    _combine(builder, deployment)
    return builder.plan()


def uses_rope(draft: Draft) -> bool:
    """Whether its layers use RoPE, as the geometry says; they share their position mode."""
    return not draft.nope_layers


def _header(
    stage: Stage, deployment: Deployment, query_length: int, rows: int, target: str, providers: Mapping[str, str] | None
) -> Header:
    chosen = dict(sorted((providers or {}).items()))
    return Header(stage, deployment.backbone.name, deployment.tp, query_length, rows, target, chosen)


def _combine(builder: PlanBuilder, deployment: Deployment) -> None:
    """fc, of which each rank has a share of the output columns."""
    draft, tp, rows = deployment.draft, deployment.tp, builder.header.rows
    builder.buffer("taps", Kind.INPUT, (rows, draft.fc_width), "bfloat16")
    fc = skinny_gemm_bf16.projections(deployment)["draft_fc" if tp == 1 else "draft_fc_shard"]
    out = "context" if tp == 1 else "context_shard"
    weight = Weight("fc", Source("fc.weight"))
    served = skinny_gemm_bf16.serving(fc, rows)
    builder.launch("fc", PROJECTION, served, {"activation": "taps", "weight": weight, "out": out})
    if tp > 1:
        gather_columns(builder, "fc.gather", "fc", out, "context", draft.hidden_size, tp)


def _project_context(builder: PlanBuilder, deployment: Deployment) -> None:
    """The norms of all layers, and their K/V projections as one stacked weight."""
    draft, rows = deployment.draft, builder.header.rows
    builder.launch(
        "context.norms",
        NORM,
        context_rmsnorm.serving(draft.hidden_size, draft.num_hidden_layers, rows),
        {
            "context": "context",
            "weight": Weight("hidden_norm", Source("hidden_norm.weight")),
            "layer_weights": stacked_pre_norms(),
            "out": "context_inputs",
            "eps": draft.norms.rms_norm_eps,
        },
    )
    builder.launch(
        "context.kv",
        PROJECTION,
        grouped_skinny_gemm_bf16.serving(grouped_skinny_gemm_bf16.context_kv(deployment), rows),
        {"activation": "context_inputs", "weight": stacked_key_values(), "out": "context_kv"},
    )


def _append_context(builder: PlanBuilder, deployment: Deployment, *, rope: bool) -> None:
    """All layers' caches have equal sizes and strides, but slots of their own."""
    draft, tp, rows = deployment.draft, deployment.tp, builder.header.rows
    attention, layers = draft.attention, range(draft.num_hidden_layers)
    shape = ("num_blocks", attention.key_value_heads(tp), attention.block_size, 2 * attention.head_dim)
    strides = ("block_stride", "head_stride", "token_stride", 1)
    given: dict[str, Given] = {"kv": "context_kv", "eps": draft.norms.rms_norm_eps}
    for layer in layers:
        slots, cache = f"layers.{layer}.slot_mapping", f"layers.{layer}.kv_cache"
        given[f"slot_mapping_{layer}"] = builder.buffer(slots, Kind.INPUT, (rows,), "int64")
        given[f"kv_cache_{layer}"] = builder.buffer(cache, Kind.KV_CACHE, shape, "bfloat16", strides=strides)
    if rope:
        given["positions"] = builder.buffer("positions", Kind.INPUT, (rows,), "int64")
        given["cos_sin"] = weights.rope_table()
    served = context_kv_precompute_append.serving(attention, tp, len(layers), rope=rope)
    builder.launch("context.append", ATTENTION, served, given, **({"max_position": "max_positions"} if rope else {}))


def stacked_pre_norms() -> Weight:
    """Every layer's pre-QKV norm, [num_layers, hidden_size]."""
    return Weight("pre_qkv_norms", Source("layers.*.self_attn.pre_qkv_proj_norm.weight", "stacked", shared=False))


def stacked_key_values() -> Weight:
    """Every layer's key and value rows, [num_layers, rows, hidden_size]: what vLLM stacks for its own context rows."""
    return Weight("context_kv_weight", Source("_stacked_kv_weight"))


class _Forward:
    """The draft's forward under way: `stream` is the residual stream, and buffers of one name serve all layers."""

    def __init__(self, deployment: Deployment, builder: PlanBuilder, *, rope: bool) -> None:
        self.draft, self.builder, self.rope, self.tp = deployment.draft, builder, rope, deployment.tp
        self.rows = builder.header.rows
        self.projections = skinny_gemm_bf16.projections(deployment)
        length = builder.header.query_length
        self.attentions = AttentionLaunches(builder, self.draft, deployment.tp, self.rows, length)

    def begin(self) -> None:
        """Input and output, the stream from the embeddings, and layer 0's first norm."""
        build, hidden = self.builder, self.draft.hidden_size
        build.buffer("inputs_embeds", Kind.INPUT, (self.rows, hidden), "bfloat16")
        build.buffer("hidden", Kind.OUTPUT, (self.rows, hidden), "bfloat16")
        build.buffer("stream", Kind.WORKSPACE, (self.rows, hidden), "float32")
        build.glue("stream", NORM, "copy_embeddings", inputs_embeds=("inputs_embeds", "in"), stream=("stream", "out"))
        build.launch(
            "layers.0.pre_qkv_norm",
            NORM,
            rmsnorm.serving(hidden, self.rows, rmsnorm.DRAFT_PRE_NORM_OF_STREAM),
            {
                "x": "stream",
                "weight": weights.norm(0, "pre_qkv_norm"),
                "out": "attention_input",
                "eps": self.draft.norms.rms_norm_eps,
            },
        )

    def attention(self, layer: int) -> None:
        """From the pre-QKV norm's output to the pre-FFN norm's."""
        draft = self.draft
        self._project(layer, "qkv_gate", "attention_input", "qkvg", "self_attn.qkv_proj.weight")
        window = 0 if layer in draft.full_attention_layers else draft.attention.sliding_window
        self.attentions.add(f"layers.{layer}", rope=self.rope, window=window)
        self._project(layer, "o_proj", "attention_output", "attention_branch", "self_attn.o_proj.weight")
        self._boundary(layer, "attn", weights.norm(layer, "pre_ffn_norm"), "ffn_input")

    def feed_forward(self, layer: int) -> None:
        """From the pre-FFN norm's output to the next layer's pre-QKV norm's, or the final norm's."""
        self._project(layer, "gate_up", "ffn_input", "ffn_hidden", "feed_forward.gate_up_proj.weight")
        self._project(layer, "down", "ffn_hidden", "ffn_branch", "feed_forward.down_proj.weight")
        last = layer == self.draft.num_hidden_layers - 1
        weight = weights.final_norm() if last else weights.norm(layer + 1, "pre_qkv_norm")
        self._boundary(layer, "ffn", weight, "hidden" if last else "attention_input")

    def _project(self, layer: int, name: str, activation: str, out: str, tensor: str) -> None:
        self.builder.launch(
            f"layers.{layer}.{name}",
            PROJECTION,
            skinny_gemm_bf16.serving(self.projections[f"draft_{name}"], self.rows),
            {"activation": activation, "weight": weights.dense(layer, name, tensor), "out": out},
        )

    def _boundary(self, layer: int, kind: str, weight: Weight, out: str) -> None:
        """Behind the branch `attn` or `ffn`, summed over the ranks. All norms are centred alike, the final one too."""
        given: dict[str, Given] = {
            "stream": "stream",
            "alpha": weights.gate(layer, kind, "alpha"),
            "beta": weights.gate(layer, kind, "beta"),
            "weight": weight,
            "activation": out,
            "post_eps": self.draft.norms.post_norm_eps,
            "eps": self.draft.norms.rms_norm_eps,
        }
        if kind == "ffn":
            given["post_weight"] = weights.norm(layer, "post_ffn_norm")
        name, branch = f"layers.{layer}.post_{kind}", "attention_branch" if kind == "attn" else "ffn_branch"
        boundary = gated_residual_rmsnorm.boundary_of("draft", "weightless" if kind == "attn" else "input_scale")
        if self.tp == 1:
            served = gated_residual_rmsnorm.serving(self.draft.hidden_size, self.rows, boundary)
            self.builder.launch(name, NORM, served, {"branch": branch, **given})
            return
        served = allreduce_gated_residual_rmsnorm.serving(self.draft.hidden_size, self.rows, self.tp, boundary)
        memory = exchange_of(served, f"post_{kind}")
        self.builder.launch(name, EXCHANGE, served, {"partial": branch, **given, **memory})
