"""The plan of the draft's sampling loop: base logits of the rank's vocabulary shard, then all steps in one launch.

The rows of hidden states are gathered outside. One rank: the winners of the other ranks' shards are not exchanged yet.
"""

from collections.abc import Mapping

from jitspark.geometry import Deployment
from jitspark.plan import Kind, Plan, Stage
from jitspark.plan import WeightSource as Source
from jitspark.plan_builder import Given, Header, Keys, PlanBuilder, Weight
from kernel_specs.markov_gumbel_sampling import spec as markov_gumbel_sampling
from kernel_specs.skinny_gemm_bf16 import spec as skinny_gemm_bf16

LOGITS, SAMPLING = "logits", "markov_sampling"
FIRST_TOKEN = "first_token"  # noqa: S105 - a number that is known when the plan is bound: where the shard begins


def markov_plan(
    deployment: Deployment,
    requests: int,
    target: str,
    *,
    multiplier: float,
    soft_cap: float | None,
    providers: Mapping[str, str] | None = None,
    keys: Keys | None = None,
) -> Plan:
    """Base logits and sampling for `requests` requests. Raises SpecError for more than a launch serves.

    Logits are soft_cap * tanh(x * multiplier / soft_cap), or x * multiplier without a cap.
    """
    draft, tp = deployment.draft, deployment.tp
    steps, rows = draft.num_speculative_tokens, requests * draft.num_speculative_tokens
    header = Header(Stage.MARKOV, deployment.backbone.name, tp, steps, rows, target, providers or {})
    builder = PlanBuilder(header, keys)
    builder.buffer("hidden", Kind.INPUT, (rows, draft.hidden_size), "bfloat16")
    builder.launch(
        "base_logits",
        LOGITS,
        skinny_gemm_bf16.serving(skinny_gemm_bf16.projections(deployment)["draft_lm_head"], rows),
        {"activation": "hidden", "weight": _weight("lm_head"), "out": "base_logits"},
    )
    specialization = markov_gumbel_sampling.specialize(
        draft.vocab_size, draft.vocab_rows(tp), draft.markov_rank, steps, capped=soft_cap is not None
    )
    _declare(builder, deployment, requests, specialization.axes["exchange_words"])
    given: dict[str, Given] = {name: name for name in markov_gumbel_sampling.STEP_INPUTS}
    given |= {
        "base_logits": "base_logits",
        "markov_w1": _weight("markov_w1"),
        "markov_w2": _weight("markov_w2"),
        "draft_tokens": "draft_tokens",
        "draft_logits": "draft_logits",
        "exchange": "exchange",
        "first_token": FIRST_TOKEN,
        "multiplier": multiplier,
    }
    if soft_cap is not None:
        given["soft_cap"] = soft_cap
    builder.launch("sampling", SAMPLING, specialization, given, num_requests=requests)
    return builder.plan()


def _weight(name: str) -> Weight:
    tensor = f"{name}.weight" if name == "lm_head" else f"model.markov_head.{name}.weight"
    return Weight(name, Source(tensor))


def _declare(builder: PlanBuilder, deployment: Deployment, requests: int, exchange_words: int) -> None:
    """The caller's tensors: vLLM's, and the kernel's own memory, which no other launch may share."""
    draft = deployment.draft
    steps = draft.num_speculative_tokens
    samples = (requests, steps)
    builder.buffer("input_ids", Kind.INPUT, ("num_tokens",), "int32")
    builder.buffer("anchor_idx", Kind.INPUT, (requests,), "int64")
    builder.buffer("sample_idx_mapping", Kind.INPUT, samples, "int64")
    builder.buffer("sample_pos", Kind.INPUT, samples, "int64")
    builder.buffer("seeds", Kind.INPUT, ("num_states",), "int64")
    builder.buffer("temperature", Kind.INPUT, ("num_states",), "float32")
    builder.buffer("draft_tokens", Kind.INPUT, samples, "int64")
    builder.buffer("draft_logits", Kind.INPUT, ("num_states", steps, draft.vocab_size), "bfloat16")
    builder.buffer("exchange", Kind.INPUT, (exchange_words,), "int64")
