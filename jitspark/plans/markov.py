"""The plan of the draft's sampling loop: base logits of the rank's vocabulary shard, then all steps in one launch.

The rows of hidden states are gathered outside. Several ranks find each step's winners inside that launch; the logits
that it leaves are then gathered and put into the cache, which is whole on every rank.
"""

from collections.abc import Mapping

from jitspark.geometry import Deployment
from jitspark.plans.builder import Given, Header, Keys, Memory, PlanBuilder, Weight
from jitspark.plans.exchange_launches import RANK, gather_columns
from jitspark.plans.plan import Kind, Plan, Stage
from jitspark.plans.plan import WeightSource as Source
from kernel_specs.draft_logits_store import spec as draft_logits_store
from kernel_specs.markov_gumbel_sampling import spec as markov_gumbel_sampling
from kernel_specs.skinny_gemm_bf16 import spec as skinny_gemm_bf16

LOGITS, SAMPLING = "logits", "markov_sampling"
FIRST_TOKEN = "first_token"  # noqa: S105 - a number that is known when the plan is bound: where the shard begins
# in place of the cache: what a rank of several needs
WITH_PEERS: Mapping[str, Given] = {
    "shard_logits": "shard_logits",
    "winners": Memory("sampling.winners", Kind.SIGNAL),
    "peers": Memory("sampling.peers", Kind.PEERS, of="sampling.winners"),
    "rank": RANK,
}


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
        draft.vocab_size, draft.vocab_rows(tp), draft.markov_rank, steps, capped=soft_cap is not None, world_size=tp
    )
    _declare(builder, deployment, requests, specialization.axes["exchange_words"])
    given: dict[str, Given] = {name: name for name in markov_gumbel_sampling.STEP_INPUTS}
    given |= {
        "base_logits": "base_logits",
        "markov_w1": _weight("markov_w1"),
        "markov_w2": _weight("markov_w2"),
        "draft_tokens": "draft_tokens",
        "exchange": "exchange",
        "first_token": FIRST_TOKEN,
        "multiplier": multiplier,
    }
    if soft_cap is not None:
        given["soft_cap"] = soft_cap
    given |= {"draft_logits": "draft_logits"} if tp == 1 else WITH_PEERS
    builder.launch("sampling", SAMPLING, specialization, given, num_requests=requests)
    if tp > 1:
        _share_logits(builder, deployment, requests)
    return builder.plan()


def _share_logits(builder: PlanBuilder, deployment: Deployment, requests: int) -> None:
    """Gather the shards' logits, and store the live requests'."""
    draft, tp = deployment.draft, deployment.tp
    steps, vocab_size = draft.num_speculative_tokens, draft.vocab_size
    builder.buffer("logits", Kind.WORKSPACE, (requests * steps, vocab_size), "bfloat16")
    gather_columns(builder, "gather_logits", "gather_logits", "shard_logits", "logits", vocab_size, tp)
    builder.launch(
        "store_logits",
        SAMPLING,
        draft_logits_store.serving(vocab_size, steps),
        {"logits": "logits", "sample_idx_mapping": "sample_idx_mapping", "draft_logits": "draft_logits"},
    )


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
