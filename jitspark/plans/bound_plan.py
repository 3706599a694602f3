"""A plan with something to call for each launch, bound to tensors: what both executors are.

A run is a walk over (callable, arguments) pairs that were made when the plan was bound; it builds no tensor, and what
it allocates or waits for is what the callables do.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from jitspark.errors import BindingError
from jitspark.plans.binding import Binding, Tensors, title
from jitspark.plans.plan import Kind, Launch, Plan
from jitspark.plans.torch_operations import TORCH_OPERATIONS

if TYPE_CHECKING:
    import torch

BLOCK_SIZE = 16  # tokens of a KV cache block
_TOKENS = {"max_positions": 1, "max_blocks": BLOCK_SIZE}  # that one of a size which is known when bound stands for

Call = Callable[..., object]
Operations = Mapping[tuple[str, str], Call]  # by (provider, operation): called with the arguments, then the statics
After = Callable[[Launch, Sequence[Any]], None]


@dataclass(frozen=True, slots=True)
class BindReport:
    """What binding took: seconds, and the bytes that the plan holds beside the caller's tensors."""

    seconds: float
    launches: int
    workspace_bytes: int
    output_bytes: int
    symmetric_bytes: int


class BoundPlan:
    """`calls` by launch name; `binding` with nothing bound yet; `max_context` as `Executor` says."""

    def __init__(self, binding: Binding, calls: Mapping[str, Call], max_context: int | None = None) -> None:
        self.plan: Plan = binding.plan
        self._binding = binding
        self._calls = calls
        self._max_context = max_context
        self._slots: dict[str, list[Any]] = {}
        self._program: tuple[tuple[Call, Sequence[Any]], ...] = ()
        self._seconds = 0.0

    @property
    def outputs(self) -> dict[str, "torch.Tensor"]:
        """The plan's output buffers by name, once everything is bound. The next run overwrites them."""
        self._binding.require_complete()
        names = [buffer.name for buffer in self.plan.buffers if buffer.kind == Kind.OUTPUT]
        return {name: self._binding.tensors[name] for name in names}

    @property
    def tensors(self) -> Tensors:
        """Every buffer's tensor, for looking at; what lies in the workspace holds its value for some launches only."""
        self._binding.require_complete()
        return dict(self._binding.tensors)

    @property
    def workspace(self) -> "torch.Tensor":
        """The arena, uint8. Between two runs, what it holds is of no consequence."""
        self._binding.require_complete()
        assert self._binding.arena is not None
        return self._binding.arena

    @property
    def report(self) -> BindReport:
        outputs = sum(each.numel() * each.element_size() for each in self.outputs.values())
        plan = self.plan
        return BindReport(self._seconds, len(plan.launches), plan.workspace_bytes, outputs, plan.symmetric_bytes)

    def bind(self, tensors: Tensors) -> None:
        """Bind weights, inputs, KV caches or outputs by buffer name, now or anew. Raises BindingError."""
        started = time.perf_counter()
        touched = self._binding.bind(tensors, self._check_context)
        if self._binding.arena is not None:
            for launch in touched if self._program else self.plan.launches:
                self._slots[launch.name] = self._binding.arguments(launch)
            self._program = tuple((self._calls[each.name], self._slots[each.name]) for each in self.plan.launches)
        self._seconds += time.perf_counter() - started

    def bind_kv_caches(self, caches: Tensors) -> None:
        """Bind KV caches, or bind them again after they were allocated anew: their sizes and strides may differ."""
        self.bind(caches)

    def bind_inputs(self, inputs: Tensors) -> None:
        """Bind the tensors that each run reads. A captured graph keeps those that it was captured with."""
        self.bind(inputs)

    def run(self, inputs: Tensors | None = None, *, after: After | None = None) -> None:
        """Launch the whole step. `inputs` other than those that are bound already are bound first.

        `after` is called with each launch and its arguments once it is launched: for comparisons, not for serving.
        """
        if inputs is not None and any(self._binding.tensors.get(name) is not each for name, each in inputs.items()):
            self.bind_inputs(inputs)
        if not self._program:
            self._binding.require_complete()
        if after is None:
            for call, arguments in self._program:
                call(*arguments)
            return
        for launch, (call, arguments) in zip(self.plan.launches, self._program, strict=True):
            call(*arguments)
            after(launch, arguments)

    def launch(self, launch: Launch) -> Sequence[Any]:
        """Run one launch of the plan alone, and return its arguments: for comparisons launch by launch."""
        self._binding.require_complete()
        arguments = self._slots[launch.name]
        self._calls[launch.name](*arguments)
        return arguments

    def laid_out(self) -> tuple[tuple[Launch, Call, list[Any]], ...]:
        """Each launch, what it calls and with which arguments: for a caller that exchanges some of them in each run."""
        self._binding.require_complete()
        return tuple((each, self._calls[each.name], list(self._slots[each.name])) for each in self.plan.launches)

    def _check_context(self, sizes: Mapping[str, int]) -> None:
        """Position tables have a row, and block tables room, for every token that a request may hold."""
        wanted = self._max_context or 0
        for name, size in sizes.items():
            tokens = _TOKENS.get(name.rpartition(".")[2])
            if tokens is not None and size * tokens < wanted:
                raise BindingError(
                    where=title(self.plan),
                    found=f"{name} = {size}, enough for {size * tokens} tokens of a request",
                    needed=f"room for {wanted} tokens (max_context)",
                    remedy="Bind larger tables, or a smaller max_context.",
                )


def operation_call(plan: Plan, launch: Launch, operations: Operations) -> Call:
    """What serves `launch` among another provider's operations, with its statics. Raises BindingError."""
    offered = {**TORCH_OPERATIONS, **operations}
    operation = offered.get((launch.provider, launch.operation))
    if operation is None:
        known = ", ".join(sorted("/".join(name) for name in offered))
        raise BindingError(
            where=f"{title(plan)}, launch {launch.name}",
            found=f"no operation {launch.operation} of provider {launch.provider}",
            needed=f"one of {known}",
            remedy="Bind that provider's operations, or make the plan with another provider for this part.",
        )
    return partial(operation, **launch.statics)
