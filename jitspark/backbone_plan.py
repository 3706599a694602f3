"""The plans of a backbone: the decode step of all layers, and the logits behind it.

The order of launches follows the step; where kernels read ahead of the launch before (`early_reads`), it leaves a
launch between writer and reader. A rank's expert weights are a slice of every expert.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from jitspark import backbone_weights as weights
from jitspark.attention_launches import AttentionLaunches
from jitspark.expert_launches import ROWS_DTYPE, SCHEDULE, ExpertLaunches
from jitspark.geometry import Backbone, Deployment
from jitspark.plan import Kind, Plan, Stage
from jitspark.plan_builder import Given, Header, Keys, PlanBuilder, Weight
from kernel_specs.expert_combine_rmsnorm import spec as expert_combine_rmsnorm
from kernel_specs.gated_residual_rmsnorm import spec as gated_residual_rmsnorm
from kernel_specs.logits_softcap import spec as logits_softcap
from kernel_specs.rmsnorm import spec as rmsnorm
from kernel_specs.router_gemm import spec as router_gemm
from kernel_specs.sigmoid_bias_topk_routing import spec as sigmoid_bias_topk_routing
from kernel_specs.skinny_gemm_bf16 import spec as skinny_gemm_bf16

LOCAL, PEER = "local", "peer"  # exchanges that stay on this rank, for a bench; exchanges between ranks

NORM, PROJECTION, ROUTER = "boundary_norm", "projection", "router"
EXPERTS, EXCHANGE, LOGITS = "experts", "all_reduce", "logits"


def decode_plan(
    deployment: Deployment,
    rows: int,
    target: str,
    *,
    providers: Mapping[str, str] | None = None,
    exchange: str = LOCAL,
    keys: Keys | None = None,
) -> Plan:
    """The decode step for `rows` rows: from embeddings to the final norm's output, and the taps on the way.

    `providers` names who serves a part instead of our kernels. Raises SpecError for rows that no kernel serves.
    """
    step = _Step(deployment, rows, target, providers or {}, exchange, keys)
    step.begin()
    for layer in range(deployment.backbone.num_hidden_layers):
        step.attention(layer)
        step.feed_forward(layer)
    return step.builder.plan()


def logits_plan(
    deployment: Deployment,
    rows: int,
    target: str,
    *,
    providers: Mapping[str, str] | None = None,
    exchange: str = LOCAL,
    keys: Keys | None = None,
) -> Plan:
    """Logits of the final norm's output: lm_head, gathered over the ranks, soft-capped; FP32 [rows, vocab_size]."""
    assert exchange == LOCAL, exchange
    backbone, tp = deployment.backbone, deployment.tp
    builder = PlanBuilder(_header(Stage.LOGITS, deployment, rows, target, providers or {}), keys)
    hidden = builder.buffer("hidden", Kind.INPUT, (rows, backbone.hidden_size), "bfloat16")
    head = skinny_gemm_bf16.projections(deployment)["lm_head"]
    shard = "logits.bfloat16" if tp == 1 else "logits.shard"
    builder.launch(
        "lm_head",
        LOGITS,
        skinny_gemm_bf16.serving(head, rows),
        {"activation": hidden, "weight": weights.lm_head(), "out": shard},
    )
    gathered = shard
    if tp > 1:
        gathered = builder.buffer("logits.bfloat16", Kind.WORKSPACE, (rows, backbone.vocab_size), "bfloat16")
        builder.glue("lm_head.gather", EXCHANGE, "allgather_columns", shard=(shard, "in"), out=(gathered, "out"))
    out = builder.buffer("logits", Kind.OUTPUT, (rows, backbone.vocab_size), "float32")
    numbers = {"multiplier": backbone.output_multiplier, "cap": backbone.final_logit_softcapping}
    builder.launch(
        "softcap",
        LOGITS,
        logits_softcap.serving(backbone.vocab_size),
        {"logits": gathered, "out": out, **numbers},
    )
    return builder.plan()


def _header(stage: Stage, deployment: Deployment, rows: int, target: str, providers: Mapping[str, str]) -> Header:
    name, tp = deployment.backbone.name, deployment.tp
    return Header(stage, name, tp, deployment.query_length, rows, target, dict(sorted(providers.items())))


@dataclass(frozen=True, slots=True)
class _Boundary:
    """What a residual boundary computes, and the names around it."""

    name: str
    branch: str
    out: str
    weight: Weight
    alpha: Weight
    beta: Weight
    statics: gated_residual_rmsnorm.Boundary
    optional: Mapping[str, Given]  # post_weight, tap


class _Step:
    """The decode step under way: `stream` is the residual stream, and buffers of one name serve all layers."""

    def __init__(
        self,
        deployment: Deployment,
        rows: int,
        target: str,
        providers: Mapping[str, str],
        exchange: str,
        keys: Keys | None,
    ) -> None:
        assert exchange == LOCAL, exchange
        self.deployment, self.rows, self.tp = deployment, rows, deployment.tp
        self.backbone: Backbone = deployment.backbone
        self.projections = skinny_gemm_bf16.projections(deployment)
        self.builder = PlanBuilder(_header(Stage.DECODE, deployment, rows, target, providers), keys)
        self.attentions = AttentionLaunches(self.builder, self.backbone, self.tp, rows, deployment.query_length)
        self.experts = ExpertLaunches(self.builder, self.backbone.experts, self.tp, rows, self.eps)

    def begin(self) -> None:
        """Inputs and outputs of the step, the stream from the embeddings, and layer 0's first norm."""
        build, hidden = self.builder, self.backbone.hidden_size
        build.buffer("inputs_embeds", Kind.INPUT, (self.rows, hidden), "bfloat16")
        build.buffer("is_padding", Kind.INPUT, (self.rows,), "uint8")
        for layer in self.backbone.tap_layers:
            build.buffer(f"taps.{layer}", Kind.OUTPUT, (self.rows, hidden), "float32")
        build.buffer("hidden", Kind.OUTPUT, (self.rows, hidden), "bfloat16")
        build.buffer("stream", Kind.WORKSPACE, (self.rows, hidden), "float32")
        build.glue("stream", NORM, "copy_embeddings", inputs_embeds=("inputs_embeds", "in"), stream=("stream", "out"))
        build.launch(
            "layers.0.pre_qkv_norm",
            NORM,
            rmsnorm.serving(hidden, self.rows, rmsnorm.PRE_NORM_OF_STREAM),
            {"x": "stream", "weight": weights.norm(0, "pre_qkv_norm"), "out": "attention_input", "eps": self.eps},
        )

    @property
    def eps(self) -> float:
        return self.backbone.norms.rms_norm_eps

    def attention(self, layer: int) -> None:
        """From the pre-QKV norm's output to the pre-FFN norm's."""
        at, backbone = f"layers.{layer}", self.backbone
        self._project(layer, "qkv_gate", "attention_input", "qkvg", "self_attn.qkv_proj.weight")
        window = 0 if layer in backbone.full_attention_layers else backbone.attention.sliding_window
        self.attentions.add(at, rope=layer not in backbone.nope_layers, window=window)
        self._project(layer, "o_proj", "attention_output", "branch", "self_attn.o_proj.weight")
        self._boundary(
            _Boundary(
                name=f"{at}.post_attention",
                branch="branch",
                out="ffn_input",
                weight=weights.norm(layer, "pre_ffn_norm"),
                alpha=weights.gate(layer, "attn", "alpha"),
                beta=weights.gate(layer, "attn", "beta"),
                statics=gated_residual_rmsnorm.boundary_of("backbone", "weightless"),
                optional={},
            )
        )

    def feed_forward(self, layer: int) -> None:
        """From the pre-FFN norm's output to the next layer's pre-QKV norm's, or the final norm's."""
        at = f"layers.{layer}"
        self._route(layer)
        self.experts.add(layer)
        self._combine(layer)
        self._project_shard(layer, "unpooler", "combined", "ffn_branch", self.backbone.hidden_size)
        last = layer == self.backbone.num_hidden_layers - 1
        tapped = layer in self.backbone.tap_layers
        self._boundary(
            _Boundary(
                name=f"{at}.post_ffn",
                branch="ffn_branch",
                out="hidden" if last else "attention_input",
                weight=weights.final_norm() if last else weights.norm(layer + 1, "pre_qkv_norm"),
                alpha=weights.gate(layer, "ffn", "alpha"),
                beta=weights.gate(layer, "ffn", "beta"),
                statics=gated_residual_rmsnorm.boundary_of(
                    "backbone", "input_scale", gain_center=0.0 if last else 1.0, tap=tapped
                ),
                optional={
                    "post_weight": weights.norm(layer, "post_ffn_norm"),
                    **({"tap": f"taps.{layer}"} if tapped else {}),
                },
            )
        )

    def _route(self, layer: int) -> None:
        """Router and pooler both read the norm's output; the schedule is complete a launch before the experts."""
        at, build = f"layers.{layer}", self.builder
        router = weights.dense(layer, "router", "feed_forward.router.weight")
        build.launch(
            f"{at}.router",
            ROUTER,
            router_gemm.serving(self.backbone, self.rows),
            {"activation": "ffn_input", "weight": router, "logits": "router_logits"},
        )
        self._project_shard(layer, "pooler", "ffn_input", "pooled", self.backbone.experts.moe_hidden_size)
        written = (*SCHEDULE, "topk_ids", "topk_weights", "num_distinct_experts")
        bias = weights.dense(layer, "router_bias", "feed_forward.expert_bias")
        build.launch(
            f"{at}.routing",
            ROUTER,
            sigmoid_bias_topk_routing.serving(self.backbone.experts, padded=True),
            {"logits": "router_logits", "bias": bias, "is_padding": "is_padding", **{name: name for name in written}},
        )

    def _combine(self, layer: int) -> None:
        at, experts = f"layers.{layer}", self.backbone.experts
        self.builder.launch(
            f"{at}.combine",
            EXPERTS,
            expert_combine_rmsnorm.serving(experts, 1, self.rows, ROWS_DTYPE),
            {
                "rows": "expert_rows",
                "topk_ids": "topk_ids",
                "topk_weights": "topk_weights",
                "weight": weights.norm(layer, "post_expert_norm"),
                "out": "combined",
                "eps": self.backbone.norms.post_norm_eps,
            },
        )

    def _project_shard(self, layer: int, name: str, activation: str, out: str, columns: int) -> None:
        """Pooler or unpooler: each rank has its columns of the product, and gathers the others'."""
        tensor = f"feed_forward.{name}.weight"
        if self.tp == 1:
            self._project(layer, name, activation, out, tensor)
            return
        shard = f"{out}_shard"
        self._project(layer, f"{name}_shard", activation, shard, tensor)
        self.builder.buffer(out, Kind.WORKSPACE, (self.rows, columns), "bfloat16")
        self.builder.glue(
            f"layers.{layer}.{name}.gather", EXCHANGE, "allgather_columns", shard=(shard, "in"), out=(out, "out")
        )

    def _project(self, layer: int, name: str, activation: str, out: str, tensor: str) -> None:
        """A dense weight, or (`_shard`) this rank's share of the rows of one that vLLM holds whole on every rank."""
        weight = name.removesuffix("_shard")
        layout = "as_is" if weight == name else "rows_of_rank"
        self.builder.launch(
            f"layers.{layer}.{weight}",
            PROJECTION,
            skinny_gemm_bf16.serving(self.projections[name], self.rows),
            {"activation": activation, "weight": weights.dense(layer, weight, tensor, layout), "out": out},
        )

    def _boundary(self, boundary: _Boundary) -> None:
        given: dict[str, Given] = {
            "branch": boundary.branch,
            "stream": "stream",
            "alpha": boundary.alpha,
            "beta": boundary.beta,
            "weight": boundary.weight,
            "activation": boundary.out,
            "post_eps": self.backbone.norms.post_norm_eps,
            "eps": self.eps,
            **boundary.optional,
        }
        served = gated_residual_rmsnorm.serving(self.backbone.hidden_size, self.rows, boundary.statics)
        self.builder.launch(boundary.name, NORM, served, given)
