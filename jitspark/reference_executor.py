"""Runs a plan with each kernel's torch reference, on a CPU or a GPU: what the executor's results are held against.

References compute in float64 and round where their specs say. Nothing here is quick; nothing here needs a kernel, a
cache or a GPU.
"""

import importlib
from collections.abc import Mapping
from functools import partial

import torch

from jitspark.bound_plan import BoundPlan, Call, Operations, operation_call
from jitspark.errors import SpecError
from jitspark.plan import Launch, Plan
from jitspark.plan_binding import Binding, SymmetricMemory, Tensors
from jitspark.registry import kernel_names, load_spec, resolve


class ReferenceExecutor(BoundPlan):
    """One plan on one device. `tensors`, by buffer name: weights, and inputs and KV caches, now or later.

    A launch of any provider runs the reference of its operation; `operations` serve those that are no kernel of ours.
    The other arguments are as `Executor` has them. Raises BindingError for whatever does not fit.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Tensors,
        device: torch.device | str = "cpu",
        *,
        operations: Operations | None = None,
        numbers: Mapping[str, float | int] | None = None,
        arena: torch.Tensor | None = None,
        outputs: Tensors | None = None,
        symmetric: SymmetricMemory | None = None,
        max_context: int | None = None,
    ) -> None:
        calls = {launch.name: reference_call(plan, launch, operations or {}) for launch in plan.launches}
        binding = Binding(plan, device, numbers=numbers, arena=arena, symmetric=symmetric)
        super().__init__(binding, calls, max_context)
        self.bind({**tensors, **(outputs or {})})


def reference_call(plan: Plan, launch: Launch, operations: Operations) -> Call:
    """The reference of a launch's operation, with its statics; of an operation without one, the provider's own.

    Raises BindingError when there is neither.
    """
    if launch.operation not in kernel_names():
        return operation_call(plan, launch, operations)
    module, name = resolve(launch.operation, load_spec(launch.operation).reference)
    try:
        function: Call = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as problem:
        raise SpecError(
            where=launch.operation,
            found=str(problem),
            needed="a reference",
            remedy=f"Mend kernel_specs/{launch.operation}/reference.py.",
        ) from problem
    return partial(function, **launch.statics)
