"""Runs a plan with each kernel's torch reference, on a CPU or a GPU: what the executor's results are held against.

References compute in float64 and round where their specs say. Nothing here is quick; nothing here needs a kernel, a
cache or a GPU.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from jitspark.errors import SpecError
from jitspark.plans.binding import Binding, SymmetricMemory, Tensors
from jitspark.plans.bound_plan import BoundPlan, Call, Operations, operation_call
from jitspark.plans.plan import Launch, Plan, TensorArgument
from jitspark.registry import kernel_names, load_spec, resolve

Gather = Callable[[Tensor], Tensor]  # what every rank has in the place of this tensor, in rank order [tp, ...]


class ReferenceExecutor(BoundPlan):
    """One plan on one device. `tensors`, by buffer name: weights, and inputs and KV caches, now or later.

    A launch of any provider runs the reference of its operation; `operations` serve those that are no kernel of ours,
    and `instead` has other callables for some, by name, to hold them against their references. `gather` brings what the
    ranks exchange; without it a rank exchanges with itself, as when all addresses are its own. The other arguments are
    as `Executor` has them. Raises BindingError for whatever does not fit.
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Tensors,
        device: torch.device | str = "cpu",
        *,
        operations: Operations | None = None,
        gather: Gather | None = None,
        instead: Mapping[str, Call] | None = None,
        numbers: Mapping[str, float | int] | None = None,
        arena: torch.Tensor | None = None,
        outputs: Tensors | None = None,
        symmetric: SymmetricMemory | None = None,
        max_context: int | None = None,
    ) -> None:
        calls = {
            launch.name: partial(instead[launch.operation], **launch.statics)
            if instead is not None and launch.operation in instead
            else reference_call(plan, launch, operations or {}, gather)
            for launch in plan.launches
        }
        binding = Binding(plan, device, numbers=numbers, arena=arena, symmetric=symmetric)
        super().__init__(binding, calls, max_context)
        self.bind({**tensors, **(outputs or {})})


def argument_names(launch: Launch) -> list[str]:
    """What its operation calls each argument; the buffer's own name where the operation is no kernel of ours."""
    if launch.operation in kernel_names():
        args = load_spec(launch.operation).args
        return [arg.name for arg in args if arg.when is None or launch.statics[arg.when[0]] == arg.when[1]]
    return [each.buffer if isinstance(each, TensorArgument) else "" for each in launch.arguments]


def reference_call(plan: Plan, launch: Launch, operations: Operations, gather: Gather | None = None) -> Call:
    """The reference of a launch's operation, with its statics; of an operation without one, the provider's own.

    Raises BindingError when there is neither.
    """
    if launch.operation not in kernel_names():
        return operation_call(plan, launch, operations)
    module, name = resolve(launch.operation, load_spec(launch.operation).reference)
    try:
        found = importlib.import_module(module)
        function: Call = getattr(found, name)
    except (ImportError, AttributeError) as problem:
        raise SpecError(
            where=launch.operation,
            found=str(problem),
            needed="a reference",
            remedy=f"Mend kernel_specs/{launch.operation}/reference.py.",
        ) from problem
    bound = partial(function, **launch.statics)
    if not hasattr(found, "deliver"):
        return bound
    names, fill = argument_names(launch), _from_all(found, gather) if gather else _from_itself(found, plan.tp)

    def call(*arguments: Any) -> None:
        fill(dict(zip(names, arguments, strict=True)))
        bound(*arguments)

    return call


def _from_all(module: ModuleType, gather: Gather) -> Callable[[dict[str, Any]], None]:
    """What puts the other ranks' packets into the inboxes of a reference's arguments."""
    return lambda named: module.deliver(gather(named[module.PAYLOAD]), named)


def _from_itself(module: ModuleType, ranks: int) -> Callable[[dict[str, Any]], None]:
    """The same for a rank whose peers' addresses are its own: what it sends comes back to it."""
    alone: Callable[[dict[str, Any]], None] | None = getattr(module, "deliver_alone", None)
    if alone is not None:
        return alone

    def fill(named: dict[str, Any]) -> None:
        payload = named[module.PAYLOAD]
        module.deliver(payload.expand(ranks, *payload.shape), named)

    return fill
