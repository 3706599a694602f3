"""The DSpark draft's fused Markov sampling loop: its weights, what it refuses, and its run in vLLM's speculator.

A rank holds its shard of the vocabulary. On a GPU the steps are one launch of ours; on a CPU the references run, and
gloo carries the winners of the shards. Refused is whatever would sample other tokens than vLLM's own loop.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod
from vllm.model_executor.models.qwen3_dspark import DSparkMarkovHead
from vllm.model_executor.models.utils import maybe_prefix

from jitspark.errors import UsageError
from jitspark.geometry import MAX_REQUESTS
from jitspark.plans.bound_plan import BoundPlan
from jitspark.runtime import options
from jitspark.runtime.fallback import attempted
from jitspark.runtime.markov_launches import SamplingWatch, bound_plans
from jitspark.runtime.markov_reference import ReferenceLoop
from jitspark.runtime.ranks import RankGroup

REFUSAL = "The Muse Spark specialized decode runs the fused DSpark Markov loop, which does not run here: "


class VocabParallelMarkovHead(DSparkMarkovHead):  # type: ignore[misc] # vLLM is seen as Any
    """vLLM's Markov head with markov_w2 [vocab, rank] sharded over the ranks; markov_w1 stays whole on each.

    Checkpoints load as before. `bias` still gives whole rows: the logits processor gathers them.
    """

    def __init__(
        self,
        vocab_size: int,
        draft_vocab_size: int,
        markov_rank: int,
        prefix: str,
        quant_config: Any = None,
        retain_weight_for_gather: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
    ) -> None:
        nn.Module.__init__(self)
        if retain_weight_for_gather:
            raise ValueError(f"{REFUSAL}dspark_draft_topk is set")
        self.markov_w1 = nn.Embedding(vocab_size, markov_rank)
        self.markov_w2 = ParallelLMHead(
            draft_vocab_size, markov_rank, quant_config=quant_config, prefix=maybe_prefix(prefix, "markov_w2")
        )
        # what vLLM's methods ask of this layer
        self.markov_w2._retain_weight_for_gather = False  # noqa: SLF001
        self.markov_w2.is_w4a16_nvfp4 = False


def build_markov_sampler(
    model: Any,
    *,
    draft_logits: torch.Tensor | None,
    draft_topk: int | None,
    watermarked: bool,
    use_fp64_gumbel: bool,
    sample_from_anchor: bool,
    max_num_reqs: int,
    num_steps: int,
) -> "MarkovSampler":
    """The loop of vLLM's draft model `model`, whose weights are loaded and whose lm_head is the one it will keep.

    draft_logits: the cache BF16 [max_num_reqs, num_steps, vocab_size], whole on every rank. The rest says how vLLM's
    speculator samples. All ranks must call it. Raises ValueError, in the draft's words, for a way of sampling that the
    loop does not have; UsageError naming the field for sizes that no kernel serves; and what `bound_plans` raises.
    """
    ranks = RankGroup.of_coordinator(get_tp_group())
    with ranks.together("the draft's sampling loop"):
        reason = (
            _sampling_reason(draft_topk, watermarked=watermarked, fp64=use_fp64_gumbel, from_anchor=sample_from_anchor)
            or _cache_reason(draft_logits, (max_num_reqs, num_steps, model.config.vocab_size))
            or _vocabulary_reason(model)
        )
        if reason is not None:
            raise ValueError(f"{REFUSAL}{reason}")
        _check_sizes(model, ranks.size)
    return MarkovSampler(model, num_steps, min(max_num_reqs, MAX_REQUESTS), ranks)


class MarkovSampler:
    """Samples every step of the draft's proposals.

    Any number of requests: they are independent of each other, and go through the loop in groups of eight.
    """

    def __init__(self, model: Any, num_steps: int, max_requests: int, ranks: RankGroup) -> None:
        self._num_steps, self._max_requests = num_steps, max_requests
        self._dtype: torch.dtype = model.lm_head.weight.dtype
        self._loops: Mapping[int, Callable[..., None]] = {}
        self._watch: SamplingWatch | None = None  # by number of requests, as the loops
        if model.lm_head.weight.device.type == "cuda":
            plans, self._watch = _bound_or_given_up(model, num_steps, max_requests, ranks)
            self._loops = {requests: _run_of(plan) for requests, plan in plans.items()}
        else:
            self._loops = dict.fromkeys(range(1, max_requests + 1), _reference_loop(model, ranks).run)

    def sample(
        self,
        num_reqs: int,
        head_hidden: torch.Tensor,
        *,
        sample_indices: torch.Tensor,
        sample_idx_mapping: torch.Tensor,
        sample_pos: torch.Tensor,
        input_ids: torch.Tensor,
        anchor_idx: torch.Tensor,
        seeds: torch.Tensor,
        temperature: torch.Tensor,
        draft_tokens: torch.Tensor,
        draft_logits: torch.Tensor,
    ) -> bool:
        """Fill draft_tokens[:num_reqs] int64 and the rows of draft_logits that live requests own.

        False, with nothing done, where vLLM's own loop must run: without memory that all ranks map, or given up.

        head_hidden: [rows, hidden]; row sample_indices[r * num_steps + j] is what request r's step j is sampled from.
        sample_idx_mapping, sample_pos: int64, per such sample: the request's state (-1: none, its logits are not
        stored), and the position of the sampled token. input_ids[anchor_idx[r]]: the token before step 0. seeds,
        temperature: per state; temperature 0 takes the largest logit. Never synchronises on a GPU: a launch that gave
        up waiting for its own CTAs or another rank is told of later, by `silence.require_all_heard`.
        """
        if not self._loops:
            return False
        steps = self._num_steps
        for first in range(0, num_reqs, self._max_requests):
            requests = min(num_reqs - first, self._max_requests)
            samples = slice(first * steps, (first + requests) * steps)
            step = {
                "hidden": head_hidden.index_select(0, sample_indices[samples]).to(self._dtype),
                "input_ids": input_ids,
                "anchor_idx": anchor_idx[first : first + requests],
                "sample_idx_mapping": sample_idx_mapping[samples].view(requests, steps),
                "sample_pos": sample_pos[samples].view(requests, steps),
                "seeds": seeds,
                "temperature": temperature,
                "draft_tokens": draft_tokens[first : first + requests],
                "draft_logits": draft_logits,
            }
            self._loops[requests](**step)
            if self._watch is not None:
                self._watch.note(requests)
        return True


def _bound_or_given_up(
    model: Any, num_steps: int, max_requests: int, ranks: RankGroup
) -> tuple[Mapping[int, BoundPlan], SamplingWatch | None]:
    """The loop's plans, bound; none, on all ranks, where one of them cannot and `on_error` says "stock"."""
    made = attempted(
        lambda: bound_plans(model, num_steps, max_requests, ranks),
        ranks,
        "the draft's sampling loop",
        "sampling loop",
        may_give_up=options.may_give_up(model.model.vllm_config),
    )
    return ({}, None) if made is None else made


def _run_of(plan: BoundPlan) -> Callable[..., None]:
    return lambda **step: plan.run(step)


def _reference_loop(model: Any, ranks: RankGroup) -> ReferenceLoop:
    head = model.model.markov_head
    multiplier, soft_cap = model.output_logit_transform_params()
    return ReferenceLoop(
        model.lm_head.weight.data,
        head.markov_w1.weight.data,
        head.markov_w2.weight.data,
        model.lm_head.shard_indices.org_vocab_start_index,
        multiplier,
        soft_cap,
        ranks,
    )


def _sampling_reason(draft_topk: int | None, *, watermarked: bool, fp64: bool, from_anchor: bool) -> str | None:
    """Why the loop cannot sample as the speculator is told to."""
    if draft_topk is not None:
        return "dspark_draft_topk is set"
    if watermarked:
        return "the draft's samples are watermarked"
    if fp64:
        return "FP64 Gumbel sampling is asked for (use_fp64_gumbel)"
    return None if from_anchor else "the draft does not sample from its anchor (sample_from_anchor)"


def _cache_reason(draft_logits: torch.Tensor | None, shape: tuple[int, ...]) -> str | None:
    """Why the loop cannot write this cache of draft logits."""
    if draft_logits is None:
        return "there are no draft logits to keep (draft_sample_method is not probabilistic)"
    if draft_logits.dtype != torch.bfloat16:
        return f"the draft logits are {draft_logits.dtype}, not BF16"
    if tuple(draft_logits.shape) != shape or not draft_logits.is_contiguous():
        return f"the draft logits are {list(draft_logits.shape)}, not whole rows of {list(shape)}"
    return None


def _vocabulary_reason(model: Any) -> str | None:
    """Why the draft's tokens are not the target's."""
    config = model.config
    mapping = getattr(model, "draft_id_to_target_id", None)
    reduced = config.draft_vocab_size != config.vocab_size or model.target_vocab_size != config.vocab_size
    if reduced or (mapping is not None and bool(mapping.any())):
        return "the draft has a reduced vocabulary (draft_vocab_size, d2t)"
    return None


def _check_sizes(model: Any, world_size: int) -> None:
    """Refuse weights that are not BF16 shards of equal size."""
    config, head = model.config, model.model.markov_head
    if config.vocab_size % world_size:
        raise _unfit("vocab_size", config.vocab_size, f"a multiple of the TP size {world_size}")
    if config.markov_rank % 32:
        raise _unfit("markov_rank", config.markov_rank, "a multiple of 32")
    multiplier, soft_cap = model.output_logit_transform_params()
    if not math.isfinite(multiplier):
        raise _unfit("metap", multiplier, "a finite output multiplier")
    if soft_cap is not None and not (math.isfinite(soft_cap) and soft_cap > 0):
        raise _unfit("output_soft_cap_temp", soft_cap, "a positive number, or none")
    rows = config.vocab_size // world_size
    for name, layer in (("lm_head", model.lm_head), ("markov_w2", head.markov_w2)):
        found = f"{type(layer.quant_method).__name__}, {layer.weight.dtype} {list(layer.weight.shape)}"
        plain = isinstance(layer.quant_method, UnquantizedEmbeddingMethod) and layer.weight.dtype == torch.bfloat16
        if not plain or layer.weight.shape[0] != rows:
            raise _unfit(f"the weight of {name}", found, f"BF16 with {rows} rows on each rank, not quantized")


def _unfit(field: str, found: object, needed: str) -> UsageError:
    return UsageError(
        where=f"the draft's config.json: {field}",
        found=str(found),
        needed=needed,
        remedy="Run this draft with stock vLLM (decode_backend auto).",
    )
