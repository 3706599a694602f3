"""Logits outside of any graph: as few launches as the plan has, on the memory that the caller brings and gets.

vLLM calls it from Python in every step with as many rows as it samples. Nothing is bound then: the arguments were laid
out when the worker started, and only the rows change.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from jitspark.bound_plan import BoundPlan
from jitspark.executor import Executor
from jitspark.plan import Kind, Launch, Plan, ScalarArgument, TensorArgument
from jitspark.reference_executor import ReferenceExecutor, reference_call
from jitspark.runtime.prepared import Prepared

Call = Callable[..., object]


class Logits:
    """FP32 soft-capped logits [rows, vocab] of BF16 hidden states [rows, hidden], for as many rows as there are plans.

    The result is new memory: the sampler writes to it, and may keep it beyond the next step.
    """

    def __init__(self, prepared: Prepared, weights: Mapping[str, torch.Tensor], device: torch.device) -> None:
        plans = prepared.logits
        self._vocab_size = prepared.deployment.backbone.vocab_size
        self._device = device
        largest = plans[max(plans)]
        width = prepared.deployment.backbone.hidden_size
        self._weights = {each.name: weights[each.name] for each in largest.buffers if each.kind is Kind.WEIGHT}
        example = torch.zeros(largest.rows, width, dtype=torch.bfloat16, device=device)
        # bound once for its checks and its scratch memory
        bound = _bound(largest, prepared, {**self._weights, "hidden": example}, device).tensors
        self._scratch = {each.name: bound[each.name] for each in largest.buffers if each.kind is Kind.WORKSPACE}
        self._steps = {rows: tuple(self._steps_of(plan, prepared)) for rows, plan in plans.items()}

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        steps = self._steps.get(len(hidden_states))
        if steps is None or not hidden_states.is_contiguous() or hidden_states.dtype != torch.bfloat16:
            return None
        out = torch.empty(len(hidden_states), self._vocab_size, dtype=torch.float32, device=self._device)
        for step in steps:
            step.launch({"hidden": hidden_states, "logits": out})
        return out

    def _steps_of(self, plan: Plan, prepared: Prepared) -> Iterator["_Step"]:
        rows = plan.rows
        for launch in plan.launches:
            call = _call(plan, launch, prepared, self._device)
            yield _Step(call, tuple(self._argument(each, rows) for each in launch.arguments))

    def _argument(self, argument: TensorArgument | ScalarArgument, rows: int) -> Any:
        """A weight, the first rows of scratch memory, a number, or the name of one of the caller's tensors."""
        if isinstance(argument, ScalarArgument):
            return argument.value
        name = argument.buffer
        if name in self._scratch:
            return self._scratch[name][:rows]
        return self._weights.get(name, name)


def _bound(plan: Plan, prepared: Prepared, given: Mapping[str, torch.Tensor], device: torch.device) -> BoundPlan:
    if device.type == "cpu":
        return ReferenceExecutor(plan, given, device)
    return Executor(plan, prepared.kernels, given, device)


def _call(plan: Plan, launch: Launch, prepared: Prepared, device: torch.device) -> Call:
    if device.type == "cpu":
        return reference_call(plan, launch, {})
    assert launch.key is not None, launch.name
    function: Call = prepared.kernels[launch.key].function
    return function


@dataclass(frozen=True, slots=True)
class _Step:
    """A launch with its arguments: a text stands for the caller's tensor of that name."""

    call: Call
    arguments: tuple[Any, ...]

    def launch(self, given: Mapping[str, torch.Tensor]) -> None:
        self.call(*(given[each] if isinstance(each, str) else each for each in self.arguments))
