"""The sampling loop's plans on a GPU: made for the model at hand, their kernels loaded, bound to its weights."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from jitspark.errors import RankError, TargetError, UsageError
from jitspark.geometry import DEFAULT_GEOMETRY, Deployment, deployment
from jitspark.plans.bound_plan import BoundPlan
from jitspark.plans.builder import Keys
from jitspark.plans.executor import Executor
from jitspark.plans.markov import FIRST_TOKEN, markov_plan
from jitspark.plans.plan import Plan
from jitspark.runtime import options
from jitspark.runtime.draft_plans import own_target
from jitspark.runtime.kernel_loading import load_kernels
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.silence import WordWatch
from jitspark.runtime.symmetric_memory import ExchangeMemory, SilentRankWatch, exchange_memory
from kernel_specs.markov_gumbel_sampling.tiling import STUCK, Tiling, choose


def bound_plans(
    model: Any, num_steps: int, max_requests: int, ranks: RankGroup
) -> "tuple[Mapping[int, BoundPlan], SamplingWatch | None]":
    """An executor for each number of requests, and the watch on their launches by the same numbers.

    All ranks must call it. None at all where ranks exchange over torch.distributed, which a launch of all steps cannot
    do in its midst. Raises UsageError for sizes that the geometry has not; TargetError for a GPU that cannot hold all
    CTAs at once; what `exchange_memory` and loading kernels raise; and RankError with another rank's reason.
    """
    device = model.lm_head.weight.device
    with ranks.together("the sampling loop's plans"):
        served = _served(model, num_steps, ranks.size)
        tiling = choose(served.draft.vocab_rows(ranks.size), served.draft.markov_rank)
        _require_multiprocessors(device, tiling)
        target = own_target(device)
        plans = _plans(model, served, target, max_requests)
    config, every = model.model.vllm_config, tuple(plans.values())
    chosen = options.from_vllm_config(config).exchanges
    peers = exchange_memory(every, ranks, device, served.backbone.tp_sizes, exchanges=chosen)
    if peers.gather is not None:
        return {}, None
    with ranks.together("binding the sampling loop's plans"):
        command = f"jitspark warm --geometry {served.backbone.name} --tp {ranks.size} --target {target}"
        kernels = load_kernels(every, options.settings_for(config), command)
        arena = torch.zeros(max(plan.workspace_bytes for plan in every), dtype=torch.uint8, device=device)
        numbers = {FIRST_TOKEN: model.lm_head.shard_indices.org_vocab_start_index, **peers.numbers}
        made, memories = {}, {}
        for requests, plan in plans.items():
            # one for each plan, as the words of its launches are told apart by their number
            memories[requests] = torch.zeros(tiling.exchange_words(num_steps), dtype=torch.int64, device=device)
            tensors = _weights(model) | {"exchange": memories[requests]}
            symmetric = peers.of(plan) if ranks.size > 1 else None
            made[requests] = Executor(plan, kernels, tensors, device, numbers=numbers, arena=arena, symmetric=symmetric)
    return made, SamplingWatch(plans, peers, memories)


class SamplingWatch:
    """The words of the loop's launches, by number of requests: `note(requests)` behind each of them.

    The loop itself knows only that somebody never came; the gather behind it waits too, and says who. So its word is
    looked at first.
    """

    def __init__(self, plans: Mapping[int, Plan], peers: ExchangeMemory, memories: Mapping[int, torch.Tensor]) -> None:
        self._plans = dict(plans)
        self._gathers = SilentRankWatch(tuple(plans.values()), peers) if peers.size > 1 else None
        self._progress = progress_watch(memories, peers.rank, peers.size)

    def note(self, requests: int) -> None:
        """Copy the words of the last launch to the host, on the current stream."""
        if self._gathers is not None:
            self._gathers.note(self._plans[requests])
        self._progress.note(requests)


def progress_watch(memories: Mapping[int, torch.Tensor], rank: int, size: int) -> WordWatch[int]:
    """Tells of launches that ended without having heard from all of their CTAs and ranks.

    memories: by number of requests, in which a launch's CTAs find each other.
    """
    words = {requests: memory[STUCK : STUCK + 1] for requests, memory in memories.items()}
    return WordWatch(words, partial(_stuck, rank, size))


def _stuck(rank: int, size: int, launch: int) -> RankError:
    return RankError(
        where=f"rank {rank} of {size}, the draft's sampling loop",
        found=f"launch {launch} gave up waiting for a part of itself or for another rank",
        needed="all of a launch's CTAs on the GPU at one time, and every rank at the same step",
        remedy="Look at the other ranks' logs, leave the GPUs to these processes alone, and start them again.",
    )


def _weights(model: Any) -> dict[str, torch.Tensor]:
    head = model.model.markov_head
    return {
        "lm_head": model.lm_head.weight.data,
        "markov_w1": head.markov_w1.weight.data,
        "markov_w2": head.markov_w2.weight.data,
    }


def _served(model: Any, num_steps: int, tp: int) -> Deployment:
    """The deployment, whose draft must be the model's in everything that is compiled in."""
    served = deployment(options.from_vllm_config(model.model.vllm_config).geometry or DEFAULT_GEOMETRY, tp)
    draft, config = served.draft, model.config
    wanted = {
        "vocab_size": (config.vocab_size, draft.vocab_size),
        "hidden_size": (config.hidden_size, draft.hidden_size),
        "markov_rank": (config.markov_rank, draft.markov_rank),
        "num_speculative_tokens": (num_steps, draft.num_speculative_tokens),
    }
    for name, (found, needed) in wanted.items():
        if found != needed:
            raise UsageError(
                where=f"the draft's config.json: {name}",
                found=str(found),
                needed=f"{needed}, as the geometry {draft.name} has it",
                remedy="Run this draft with stock vLLM (decode_backend auto), or with a geometry of its own.",
            )
    return served


def _plans(model: Any, served: Deployment, target: str, max_requests: int) -> dict[int, Plan]:
    multiplier, soft_cap = model.output_logit_transform_params()
    keys = Keys(target)
    return {
        requests: markov_plan(served, requests, target, multiplier=multiplier, soft_cap=soft_cap, keys=keys)
        for requests in range(1, max_requests + 1)
    }


def _require_multiprocessors(device: torch.device, tiling: Tiling) -> None:
    found = torch.cuda.get_device_properties(device).multi_processor_count
    if found < tiling.num_ctas:
        raise TargetError(
            where=f"the draft's sampling loop on {device}",
            found=f"{found} multiprocessors",
            needed=f"{tiling.num_ctas}, one for each CTA of a launch: they wait for each other",
            remedy="Leave the part markov_sampling to stock on this GPU.",
        )
