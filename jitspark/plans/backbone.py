"""The plans of a backbone: the decode step of all layers, and the logits behind it.

Several ranks exchange inside the kernels: the residual boundaries behind o_proj and unpooler, the pooler's columns, and
the experts' partial rows; a rank alone has the same step without. Launches stand in the order of the step, and where a
kernel reads ahead of the launch before (`early_reads`) there is one between writer and reader, or the writer is done
with it before others may begin (`early_writes`). A rank's experts are a slice of each.
"""

from collections.abc import Mapping, Sequence

from jitspark.errors import SpecError
from jitspark.geometry import Backbone, Deployment
from jitspark.plans import backbone_weights as weights
from jitspark.plans.attention_launches import AttentionLaunches
from jitspark.plans.builder import Given, Header, Keys, PlanBuilder
from jitspark.plans.exchange_launches import exchange_of, gather_columns
from jitspark.plans.expert_launches import ROWS_DTYPE, SCHEDULE, ExpertLaunches
from jitspark.plans.plan import CUTE, Kind, Plan, Stage
from jitspark.spec import Specialization
from kernel_specs.allgather_gated_residual_rmsnorm import spec as allgather_gated_residual_rmsnorm
from kernel_specs.allgather_rmsnorm_nvfp4_quantize_routing import spec as allgather_rmsnorm_nvfp4_quantize_routing
from kernel_specs.allreduce_gated_residual_rmsnorm import spec as allreduce_gated_residual_rmsnorm
from kernel_specs.expert_combine_rmsnorm import spec as expert_combine_rmsnorm
from kernel_specs.expert_reduce_rmsnorm_combine import spec as expert_reduce_rmsnorm_combine
from kernel_specs.gated_residual_rmsnorm import spec as gated_residual_rmsnorm
from kernel_specs.logits_softcap import spec as logits_softcap
from kernel_specs.rmsnorm import spec as rmsnorm
from kernel_specs.router_gemm import spec as router_gemm
from kernel_specs.router_pooler_gemm import spec as router_pooler_gemm
from kernel_specs.sigmoid_bias_topk_routing import spec as sigmoid_bias_topk_routing
from kernel_specs.skinny_gemm_bf16 import spec as skinny_gemm_bf16

NORM, PROJECTION, ROUTER = "boundary_norm", "projection", "router"
EXPERTS, EXCHANGE, LOGITS = "experts", "all_reduce", "logits"
POOLER = "feed_forward.pooler.weight"


def decode_plan(
    deployment: Deployment,
    rows: int,
    target: str,
    *,
    providers: Mapping[str, str] | None = None,
    keys: Keys | None = None,
) -> Plan:
    """The decode step for `rows` rows: from embeddings to the final norm's output, and the taps on the way.

    `providers` names who serves a part instead of our kernels. Raises SpecError for rows that no kernel serves.
    """
    _require_served(rows, deployment.backbone_rows, "a decode step")
    step = _Step(deployment, rows, target, providers or {}, keys)
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
    keys: Keys | None = None,
) -> Plan:
    """Logits of the final norm's output: lm_head, gathered over the ranks, soft-capped; FP32 [rows, vocab_size].

    Raises SpecError as `decode_plan`.
    """
    _require_served(rows, range(1, max(deployment.backbone_rows) + 1), "logits")
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
        gathered = "logits.bfloat16"
        gather_columns(builder, "lm_head.gather", "logits", shard, gathered, backbone.vocab_size, tp)
    out = builder.buffer("logits", Kind.OUTPUT, (rows, backbone.vocab_size), "float32")
    numbers = {"multiplier": backbone.output_multiplier, "cap": backbone.final_logit_softcapping}
    builder.launch(
        "softcap",
        LOGITS,
        logits_softcap.serving(backbone.vocab_size),
        {"logits": gathered, "out": out, **numbers},
    )
    return builder.plan()


def _require_served(rows: int, served: Sequence[int], what: str) -> None:
    if rows not in served:
        raise SpecError(
            where=what,
            found=f"{rows} rows",
            needed=f"{served[0]} to {served[-1]} in steps of {served[1] - served[0]}",
            remedy="Ask for rows that kernels are made for; others are stock's.",
        )


def _header(stage: Stage, deployment: Deployment, rows: int, target: str, providers: Mapping[str, str]) -> Header:
    name, tp = deployment.backbone.name, deployment.tp
    return Header(stage, name, tp, deployment.query_length, rows, target, dict(sorted(providers.items())))


class _Step:
    """The decode step under way: `stream` is the residual stream, and buffers of one name serve all layers."""

    def __init__(
        self,
        deployment: Deployment,
        rows: int,
        target: str,
        providers: Mapping[str, str],
        keys: Keys | None,
    ) -> None:
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
        boundary = gated_residual_rmsnorm.boundary_of("backbone", "weightless")
        given: dict[str, Given] = {
            "alpha": weights.gate(layer, "attn", "alpha"),
            "beta": weights.gate(layer, "attn", "beta"),
            "weight": weights.norm(layer, "pre_ffn_norm"),
            "activation": "ffn_input",
        }
        if self.tp == 1:
            self._boundary(f"{at}.post_attention", "branch", boundary, given)
            return
        served = allreduce_gated_residual_rmsnorm.serving(backbone.hidden_size, self.rows, self.tp, boundary)
        self._exchange_boundary(f"{at}.post_attention", served, {"partial": "branch", **given}, "post_attention")

    def feed_forward(self, layer: int) -> None:
        """From the pre-FFN norm's output to the next layer's pre-QKV norm's, or the final norm's."""
        at = f"layers.{layer}"
        self._expert_rows(layer)
        self._combine(layer)
        last = layer == self.backbone.num_hidden_layers - 1
        tapped = layer in self.backbone.tap_layers
        boundary = gated_residual_rmsnorm.boundary_of(
            "backbone", "input_scale", gain_center=0.0 if last else 1.0, tap=tapped
        )
        given: dict[str, Given] = {
            "post_weight": weights.norm(layer, "post_ffn_norm"),
            "alpha": weights.gate(layer, "ffn", "alpha"),
            "beta": weights.gate(layer, "ffn", "beta"),
            "weight": weights.final_norm() if last else weights.norm(layer + 1, "pre_qkv_norm"),
            "activation": "hidden" if last else "attention_input",
            **({"tap": f"taps.{layer}"} if tapped else {}),
        }
        if self.tp == 1:
            self._project(layer, "unpooler", "combined", "ffn_branch", "feed_forward.unpooler.weight")
            self._boundary(f"{at}.post_ffn", "ffn_branch", boundary, given)
            return
        self._project(layer, "unpooler_shard", "combined", "ffn_branch_shard", "feed_forward.unpooler.weight")
        served = allgather_gated_residual_rmsnorm.serving(self.backbone.hidden_size, self.rows, self.tp, boundary)
        self._exchange_boundary(f"{at}.post_ffn", served, {"shard": "ffn_branch_shard", **given}, "post_ffn")

    def _expert_rows(self, layer: int) -> None:
        """The router's logits and the pooled rows; the schedule is complete before the experts may begin."""
        at, build = f"layers.{layer}", self.builder
        self._score_and_pool(layer)
        written = (*SCHEDULE, "topk_ids", "topk_weights", "num_distinct_experts")
        bias = weights.dense(layer, "router_bias", "feed_forward.expert_bias")
        routing: dict[str, Given] = {"logits": "router_logits", "bias": bias, "is_padding": "is_padding"}
        routing |= {name: name for name in written}
        if self._in_one_launch(layer):
            served = allgather_rmsnorm_nvfp4_quantize_routing.serving(self.backbone.experts, self.tp)
            given: dict[str, Given] = {"shard": "pooled_shard", **self.experts.quantized(layer), **routing}
            build.launch(f"{at}.expert_input", EXCHANGE, served, given | exchange_of(served, "expert_input"))
            self.experts.add_quantized(layer)
            return
        if self.tp > 1:
            columns = self.backbone.experts.moe_hidden_size
            gather_columns(build, f"{at}.pooler.gather", "pooler", "pooled_shard", "pooled", columns, self.tp)
        served = sigmoid_bias_topk_routing.serving(self.backbone.experts, padded=True)
        build.launch(f"{at}.routing", ROUTER, served, routing)
        self.experts.add(layer)

    def _in_one_launch(self, layer: int) -> bool:
        """Whether one kernel gathers, norms and quantizes the experts' input and routes: if all of it is ours to do."""
        ours = all(self.builder.provider(part) == CUTE for part in (EXCHANGE, EXPERTS, ROUTER))
        served = allgather_rmsnorm_nvfp4_quantize_routing.serves(self.backbone.experts)
        return ours and served and self.tp > 1 and self.experts.are_nvfp4(layer)

    def _score_and_pool(self, layer: int) -> None:
        """Router and pooler read the same rows: one launch if both are ours and rows are few. Ranks pool a share."""
        at, build = f"layers.{layer}", self.builder
        router = weights.dense(layer, "router", "feed_forward.router.weight")
        pooler, pooled = ("pooler", "pooled") if self.tp == 1 else ("pooler_shard", "pooled_shard")
        given: dict[str, Given] = {"activation": "ffn_input", "logits": "router_logits"}
        ours = build.provider(ROUTER) == build.provider(PROJECTION) == CUTE
        if ours and router_pooler_gemm.serves(self.deployment, self.rows):
            given |= {"router": router, "pooler": self._dense(layer, pooler, POOLER), "pooled": pooled}
            build.launch(f"{at}.router_pooler", ROUTER, router_pooler_gemm.serving(self.deployment, self.rows), given)
            return
        given["weight"] = router
        build.launch(f"{at}.router", ROUTER, router_gemm.serving(self.backbone, self.rows), given)
        self._project(layer, pooler, "ffn_input", pooled, POOLER)

    def _combine(self, layer: int) -> None:
        """The experts' rows, whole or summed over the ranks, normed and summed per token."""
        name, experts = f"layers.{layer}.combine", self.backbone.experts
        given: dict[str, Given] = {
            "rows": "expert_rows",
            "topk_ids": "topk_ids",
            "topk_weights": "topk_weights",
            "weight": weights.norm(layer, "post_expert_norm"),
            "out": "combined",
            "eps": self.backbone.norms.post_norm_eps,
        }
        if self.tp == 1:
            served = expert_combine_rmsnorm.serving(experts, 1, self.rows, ROWS_DTYPE)
            self.builder.launch(name, EXPERTS, served, given)
            return
        served = expert_reduce_rmsnorm_combine.serving(experts, self.tp, ROWS_DTYPE)
        owned = expert_reduce_rmsnorm_combine.owned_tokens(self.rows, self.tp)
        self.builder.launch(name, EXCHANGE, served, given | exchange_of(served, "combine"), num_owned=owned)

    def _project(self, layer: int, name: str, activation: str, out: str, tensor: str) -> None:
        """The product with a dense weight, or (`_shard`) with this rank's share of one."""
        self.builder.launch(
            f"layers.{layer}.{name.removesuffix('_shard')}",
            PROJECTION,
            skinny_gemm_bf16.serving(self.projections[name], self.rows),
            {"activation": activation, "weight": self._dense(layer, name, tensor), "out": out},
        )

    def _dense(self, layer: int, name: str, tensor: str) -> Given:
        """A dense weight, or (`_shard`) this rank's share of the rows of one that vLLM holds whole on every rank."""
        weight = name.removesuffix("_shard")
        return weights.dense(layer, weight, tensor, "as_is" if weight == name else "rows_of_rank")

    def _boundary(
        self, name: str, branch: str, boundary: gated_residual_rmsnorm.Boundary, given: Mapping[str, Given]
    ) -> None:
        served = gated_residual_rmsnorm.serving(self.backbone.hidden_size, self.rows, boundary)
        self.builder.launch(name, NORM, served, {"branch": branch, **given, **self._residual()})

    def _exchange_boundary(self, name: str, served: Specialization, given: Mapping[str, Given], exchange: str) -> None:
        """A boundary with an exchange in front of it; those of one kind share their memory."""
        self.builder.launch(name, EXCHANGE, served, {**given, **exchange_of(served, exchange), **self._residual()})

    def _residual(self) -> dict[str, Given]:
        return {"stream": "stream", "post_eps": self.backbone.norms.post_norm_eps, "eps": self.eps}
