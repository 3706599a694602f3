"""Logits outside of any graph: as few launches as the plan has, on the memory that the caller brings and gets.

vLLM calls it from Python in every step with as many rows as it samples. Nothing is bound then: the arguments were laid
out when the worker started, and only the rows change.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jitspark.executor import Executor
from jitspark.plan import Kind, Plan, TensorArgument
from jitspark.runtime.prepared import Prepared

Call = Callable[..., object]


class Logits:
    """FP32 soft-capped logits [rows, vocab] of BF16 hidden states [rows, hidden], for as many rows as there are plans.

    The result is new memory: the sampler writes to it, and may keep it beyond the next step.
    """

    def __init__(self, prepared: Prepared, weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
        plans = prepared.logits
        self._vocab_size = prepared.deployment.backbone.vocab_size
        largest = plans[max(plans)]
        self._weights = {each.name: weights[each.name] for each in largest.buffers if each.kind is Kind.WEIGHT}
        example = torch.zeros(
            largest.rows, prepared.deployment.backbone.hidden_size, dtype=torch.bfloat16, device=device
        )
        # bound once for its checks and its scratch memory
        bound = Executor(largest, prepared.kernels, {**self._weights, "hidden": example}, device).tensors
        self._scratch = {each.name: bound[each.name] for each in largest.buffers if each.kind is Kind.WORKSPACE}
        self._steps = {rows: self._laid_out(plan, prepared) for rows, plan in plans.items()}
        self._device = device

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        steps = self._steps.get(len(hidden_states))
        if steps is None or not hidden_states.is_contiguous() or hidden_states.dtype != torch.bfloat16:
            return None
        out = torch.empty(len(hidden_states), self._vocab_size, dtype=torch.float32, device=self._device)
        for step in steps:
            step.launch({"hidden": hidden_states, "logits": out})
        return out

    def _laid_out(self, plan: Plan, prepared: Prepared) -> tuple["_Step", ...]:
        fixed = {**self._weights, **{name: memory[: plan.rows] for name, memory in self._scratch.items()}}
        return tuple(
            _Step(
                prepared.kernels[launch.key].function,
                tuple(
                    fixed.get(a.buffer, a.buffer) if isinstance(a, TensorArgument) else a.value
                    for a in launch.arguments
                ),
            )
            for launch in plan.launches
            if launch.key is not None
        )


@dataclass(frozen=True, slots=True)
class _Step:
    """A launch with its arguments: a text stands for the caller's tensor of that name."""

    call: Call
    arguments: tuple[Any, ...]

    def launch(self, given: Mapping[str, torch.Tensor]) -> None:
        self.call(*(given[each] if isinstance(each, str) else each for each in self.arguments))
