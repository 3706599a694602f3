"""Logits outside of any graph: as few launches as the plan has, on the memory that the caller brings and gets.

vLLM calls it from Python in every step with as many rows as it samples. Nothing is bound or checked then: the arguments
were laid out when the worker started, and only two of them change.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from jitspark.plans.bound_plan import BoundPlan
from jitspark.plans.plan import Buffer, Plan, TensorArgument

Bind = Callable[[Plan, Mapping[str, torch.Tensor]], BoundPlan]  # weights aside, with these tensors by buffer name
HIDDEN, LOGITS = "hidden", "logits"


class Logits:
    """FP32 soft-capped logits [rows, vocab] of BF16 hidden states [rows, hidden], by the plan for as many rows or more.

    The result is new memory: the sampler writes to it, and may keep it beyond the next step. `note` is called behind
    each run of a plan.
    """

    def __init__(
        self, plans: Mapping[int, Plan], bind: Bind, device: torch.device, note: Callable[[Plan], None]
    ) -> None:
        buffers = plans[max(plans)].buffer_named()
        self._hidden, logits = (_zeros(buffers[name], device) for name in (HIDDEN, LOGITS))
        self._vocab_size, self._device = logits.shape[1], device
        self._plans, self._note, self._rows = plans, note, sorted(plans)
        self._launches = {
            rows: tuple(_launches(bind(plan, {HIDDEN: self._hidden[:rows], LOGITS: logits[:rows]})))
            for rows, plan in plans.items()
        }

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """None for no rows, for more than there are plans for, and for hidden states that no plan takes."""
        count = len(hidden_states)
        known = hidden_states.is_contiguous() and hidden_states.dtype == torch.bfloat16
        if not 0 < count <= self._rows[-1] or not known:
            return None
        rows = self._rows[bisect_left(self._rows, count)]
        if rows != count:
            self._hidden[:count] = hidden_states
            hidden_states = self._hidden[:rows]
        out = torch.empty(rows, self._vocab_size, dtype=torch.float32, device=self._device)
        given = {HIDDEN: hidden_states, LOGITS: out}
        for call, arguments, places in self._launches[rows]:
            for place, name in places:
                arguments[place] = given[name]
            call(*arguments)
            for place, _ in places:
                arguments[place] = None  # whoever holds the result decides when it is freed
        self._note(self._plans[rows])
        return out[:count]


def _launches(bound: BoundPlan) -> Iterable[tuple[Callable[..., object], list[Any], list[tuple[int, str]]]]:
    """What each launch calls, its arguments, and where among them stand the caller's tensors."""
    for launch, call, arguments in bound.laid_out():
        named = [each.buffer if isinstance(each, TensorArgument) else "" for each in launch.arguments]
        yield call, arguments, [(place, name) for place, name in enumerate(named) if name in (HIDDEN, LOGITS)]


def _zeros(buffer: Buffer, device: torch.device) -> torch.Tensor:
    return torch.zeros(*buffer.shape, dtype=getattr(torch, buffer.dtype), device=device)
