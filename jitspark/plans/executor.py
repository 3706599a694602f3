"""Runs a plan with kernels from the cache: bound once, then launches and nothing else.

`run` allocates nothing on the device, builds no tensor and never synchronises, so that it can be captured in a CUDA
graph; it launches on torch's current stream. Missing entries are built before anything is bound, never later.
Importing this module imports neither torch nor the compiler.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from jitspark.cache.loader import Kernel, Loader
from jitspark.cache.lookup import Lookup
from jitspark.errors import MissingEntriesError, TargetError
from jitspark.key import Key
from jitspark.plans.binding import Binding, SymmetricMemory, Tensors, title
from jitspark.plans.bound_plan import BoundPlan, Call, Operations, operation_call
from jitspark.plans.launch_signature import Signature
from jitspark.plans.plan import CUTE, Launch, Plan
from jitspark.settings import Settings
from jitspark.target import target_of_capability

if TYPE_CHECKING:
    import torch

    from jitspark.building.progress import Event, Wanted


class Executor(BoundPlan):
    """One plan on one device.

    kernels: the plan's entries, loaded (`load_kernels`). weights: by buffer name; inputs and KV caches may come with
    them, or later. operations: those of other providers. numbers: the scalars that the plan leaves open, such as
    `rank`. arena: memory to share with executors that never run at the same time, `plan.workspace_bytes` of uint8 at
    least. outputs: memory for outputs that the caller wants in a place of its own. max_context: the most tokens of a
    request; position tables and block tables must hold as many. instead: what serves a launch in the place of its
    kernel, given both.

    Raises BindingError for whatever does not fit, MissingEntriesError for a kernel that is not there, TargetError for
    a plan of another GPU architecture. A failed constructor has launched nothing.
    """

    def __init__(
        self,
        plan: Plan,
        kernels: Mapping[Key, Kernel],
        weights: Tensors,
        device: "torch.device | str",
        *,
        operations: Operations | None = None,
        numbers: Mapping[str, float | int] | None = None,
        arena: "torch.Tensor | None" = None,
        outputs: Tensors | None = None,
        symmetric: SymmetricMemory | None = None,
        max_context: int | None = None,
        instead: Callable[[Launch, Call], Call] = lambda _, kernel: kernel,
    ) -> None:
        calls = {each.name: instead(each, _call(plan, each, kernels, operations or {})) for each in plan.launches}
        signatures = _signatures(plan, kernels)
        binding = Binding(plan, device, signatures=signatures, numbers=numbers, arena=arena, symmetric=symmetric)
        _check_device(plan, binding.device)
        super().__init__(binding, calls, max_context)
        self.bind({**weights, **(outputs or {})})


def load_kernels(
    plans: Iterable[Plan],
    lookup: Lookup,
    loader: Loader,
    settings: Settings,
    *,
    warm_command: str | None = None,
    on_event: "Callable[[Event], None]" = lambda _: None,
) -> dict[Key, Kernel]:
    """The kernels of these plans' keys, loaded; entries that are missing are built first, if the settings allow it.

    `on_event` is told what is built meanwhile, `warm_command` is what makes all of it, for the error. Raises
    MissingEntriesError where they do not, or where a key is of other sources than this process has, and what
    `build_and_load` raises.
    """
    plans = list(plans)
    keys = list(dict.fromkeys(itertools.chain.from_iterable(plan.keys() for plan in plans)))
    entries = lookup.find_all(keys)
    found = [entry for entry in entries if entry is not None]
    if len(found) == len(keys):
        return dict(zip(keys, loader.load(found), strict=True))
    from jitspark.building.build import build_and_load  # what only loads has no use for it

    missing = _wanted(plans, {key for key, entry in zip(keys, entries, strict=True) if entry is None})
    built = build_and_load(missing, lookup, loader, settings, warm_command=warm_command, on_event=on_event)
    return {
        **{kernel.entry.key: kernel for kernel in loader.load(found)},
        **{item.key: kernel for item, kernel in zip(missing, built, strict=True)},
    }


def _wanted(plans: Iterable[Plan], missing: set[Key]) -> "list[Wanted]":
    """What to build for the missing keys: the plans' deployments ask for them, if the sources are still the same."""
    from jitspark.building.build import missing_entries, wanted_for
    from jitspark.geometry import deployment
    from jitspark.registry import specializations

    found: dict[Key, Wanted] = {}
    names = sorted({key.kernel for key in missing})
    for geometry, tp, target in dict.fromkeys((plan.geometry, plan.tp, plan.target) for plan in plans):
        found |= {item.key: item for item in wanted_for(specializations(deployment(geometry, tp), names), [target])}
    unknown = [key for key in missing if key not in found]
    if unknown:
        raise missing_entries(
            unknown,
            needed="keys that this version's kernels have",
            remedy="The plan was made from other sources: make it anew with `jitspark warm`.",
        )
    return [found[key] for key in sorted(missing)]


def _call(plan: Plan, launch: Launch, kernels: Mapping[Key, Kernel], operations: Operations) -> Call:
    """What serves a launch: a kernel takes its arguments alone, an operation of another provider the statics too."""
    if launch.provider != CUTE:
        return operation_call(plan, launch, operations)
    kernel = None if launch.key is None else kernels.get(launch.key)
    if kernel is None:
        raise MissingEntriesError(
            where=f"{title(plan)}, launch {launch.name}",
            found=f"no kernel for {launch.key}",
            needed="every entry that the plan names",
            remedy="Load the plan's kernels before binding it.",
            keys=() if launch.key is None else (str(launch.key),),
        )
    function: Call = kernel.function
    return function


def _signatures(plan: Plan, kernels: Mapping[Key, Kernel]) -> dict[str, Signature]:
    """By launch; launches of one kernel share theirs."""
    wanted = plan.keys()
    made = {key: Signature.of(kernels[key].entry.record) for key in wanted}
    return {each.name: made[each.key] for each in plan.launches if each.provider == CUTE and each.key is not None}


def _check_device(plan: Plan, device: "torch.device") -> None:
    """Refuse here what a launch would refuse as cudaErrorNoKernelImageForDevice."""
    import torch

    if not plan.keys():
        return
    found = target_of_capability(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else None
    if found != plan.target:
        raise TargetError(
            where=title(plan),
            found=f"a plan for {plan.target} and a device {device} for {found or 'no target'}",
            needed="a plan for the device's own target",
            remedy=f"Make one with `jitspark warm --target {found}`." if found else "Run it on a supported GPU.",
        )
