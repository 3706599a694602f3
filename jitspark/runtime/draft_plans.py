"""The draft's plans of a vLLM deployment: for the loaded draft model, on this rank's device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jitspark.errors import TargetError
from jitspark.geometry import DEFAULT_GEOMETRY, MAX_REQUESTS, Deployment, Draft, deployment
from jitspark.plans.builder import Keys
from jitspark.plans.draft import combine_plan, context_plan, draft_plan
from jitspark.plans.plan import Plan
from jitspark.runtime import draft_config, options
from jitspark.target import DEFAULT_TARGET, TARGETS, target_of_capability


@dataclass(frozen=True, slots=True)
class DraftPlans:
    """A draft's plans by number of rows."""

    deployment: Deployment
    target: str
    forward: Mapping[int, Plan]
    combine: Mapping[int, Plan]
    context: Mapping[int, Plan]

    @property
    def every(self) -> tuple[Plan, ...]:
        return (*self.exchanging, *self.context.values())

    @property
    def exchanging(self) -> tuple[Plan, ...]:
        """Those in which several ranks exchange."""
        return (*self.forward.values(), *self.combine.values())


def make_plans(model: Any, device: torch.device, tp: int) -> DraftPlans:
    """The plans of `model`, vLLM's inner draft model, on a device.

    Raises UsageError for a config that no kernel serves, TargetError for a device that has none.
    """
    config = model.vllm_config
    served = deployment(options.from_vllm_config(config).geometry or DEFAULT_GEOMETRY, tp)
    draft_config.check(model, served.draft)
    served = Deployment(served.backbone, draft_config.as_loaded(model, served.draft), tp)
    target = DEFAULT_TARGET if device.type == "cpu" else own_target(device)
    requests = range(1, min(MAX_REQUESTS, config.scheduler_config.max_num_seqs) + 1)
    rope, keys = model.config.use_rope, Keys(target)
    query = [each * served.draft.num_speculative_tokens for each in requests]
    context = [each * served.query_length for each in requests]
    combined = context if _has_our_fc(model, served.draft, tp) else ()
    return DraftPlans(
        served,
        target,
        {rows: draft_plan(served, rows, target, rope=rope, keys=keys) for rows in query},
        {rows: combine_plan(served, rows, target, keys=keys) for rows in combined},
        {rows: context_plan(served, rows, target, rope=rope, keys=keys) for rows in context},
    )


def _has_our_fc(model: Any, draft: Draft, tp: int) -> bool:
    """Whether fc is held as its plan reads it; a quantized one, or one that stayed whole, is stock's."""
    weight = getattr(model.fc, "weight", None)
    shape = (draft.hidden_size // tp, draft.fc_width)
    return isinstance(weight, torch.Tensor) and weight.dtype == torch.bfloat16 and tuple(weight.shape) == shape


def own_target(device: torch.device) -> str:
    """The target of this rank's GPU. Raises TargetError for one without kernels."""
    capability = torch.cuda.get_device_capability(device)
    found = target_of_capability(*capability)
    if found is None:
        raise TargetError(
            where=f"the draft's device {device}",
            found=f"compute capability {capability[0]}.{capability[1]}",
            needed=f"one of {', '.join(TARGETS)}",
            remedy="Run stock (decode_backend auto) on this GPU.",
        )
    return found
