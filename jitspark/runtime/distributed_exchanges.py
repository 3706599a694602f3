"""The exchanges over torch.distributed, where ranks cannot map each other's memory: a gather, then what is left to do.

In a step of kernels a gather brings what the others have to say, and a kernel does the rest: the exchange's own, which
finds its inbox full, or the one that works on all ranks' parts. So ranks end with the bits that they end with over
mapped memory. Elsewhere the references do. All of it can be captured, nothing waits for the GPU, and whether a silent
rank is noticed is the backend's affair.
"""

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from jitspark.cache.loader import Kernel
from jitspark.errors import MissingEntriesError
from jitspark.key import Key
from jitspark.plans.binding import title
from jitspark.plans.bound_plan import Call
from jitspark.plans.builder import Keys
from jitspark.plans.plan import CUTE, Launch, Plan, TensorArgument
from jitspark.plans.reference_executor import argument_names
from jitspark.registry import load_spec, resolve
from kernel_specs.expert_combine_rmsnorm import spec as expert_combine_rmsnorm

if TYPE_CHECKING:  # the library that reads one need not be installed
    from jitspark.geometry import Deployment

EXPERT_REDUCE = "expert_reduce_rmsnorm_combine"
EXCHANGES = (
    "allreduce_gated_residual_rmsnorm",
    "allgather_gated_residual_rmsnorm",
    "allgather_columns",
    "allgather_rmsnorm_nvfp4_quantize_routing",
    EXPERT_REDUCE,
)

Gather = Callable[[torch.Tensor], torch.Tensor]  # this rank's tensor -> every rank's, [world, ...] in rank order


def distributed_operations(provider: str, gather: Gather) -> Mapping[tuple[str, str], Callable[..., None]]:
    """What serves all exchanges of a plan for `provider` by their references, by (provider, operation)."""
    return {(provider, name): exchange_over(name, gather) for name in EXCHANGES}


def exchange_over(operation: str, gather: Gather) -> Callable[..., None]:
    """`operation` by its reference, called with its kernel's arguments and then its statics by name."""
    spec = load_spec(operation)
    module, reference = _reference(operation)

    def call(*arguments: Any, **statics: Any) -> None:
        present = [arg for arg in spec.args if arg.when is None or statics[arg.when[0]] == arg.when[1]]
        named = {arg.name: value for arg, value in zip(present, arguments, strict=True)}
        module.deliver(gather(named[module.PAYLOAD]), named)
        reference(*arguments, **statics)

    return call


def gathered_first(
    plan: Plan, deployment: "Deployment", kernels: Mapping[Key, Kernel], gather: Gather
) -> Callable[[Launch, Call], Call]:
    """What takes the place of a launch's kernel in `plan`: the kernel itself where nothing is exchanged.

    kernels: the deployment's, all of them. The plan's memory has, in the place of the other ranks' addresses, those of
    memory that nobody reads (`symmetric_memory`): the kernels send as ever. Raises MissingEntriesError.
    """
    keys = Keys(plan.target)

    def served(launch: Launch, kernel: Call) -> Call:
        if launch.provider != CUTE:
            return kernel
        module, _ = _reference(launch.operation)
        if not hasattr(module, "deliver"):
            return kernel
        names = argument_names(launch)
        if launch.operation == EXPERT_REDUCE:
            kernel = _combine_kernel(plan, launch, deployment, kernels, keys)
            return _combined(names, gather, kernel, int(launch.statics["cluster"]))
        return _delivered(names, gather, module, kernel)

    return served


def _delivered(names: list[str], gather: Gather, module: ModuleType, kernel: Call) -> Call:
    """The kernel behind a gather that fills its inboxes, with the bits that the others' kernels would send."""
    inboxes = [name for name in module.INBOXES if name in names]

    def call(*arguments: Any) -> None:
        named = dict(zip(names, arguments, strict=True))
        module.deliver(gather(named[module.PAYLOAD]), named)
        for name in inboxes:
            named[name][0].zero_()  # the kernel sends to itself
        kernel(*arguments)

    return call


def _combined(names: list[str], gather: Gather, kernel: Call, counters: int) -> Call:
    """The kernel that combines all ranks' partial rows, of all tokens on every rank: what the exchange's own would get
    from the others is rounded, and `deliver` computes it another way. `counters`: of each row, for an exchange.
    """

    def call(*arguments: Any) -> None:
        named = dict(zip(names, arguments, strict=True))
        rest = (named[name] for name in ("topk_ids", "topk_weights", "weight", "out", "eps"))
        kernel(gather(named["rows"]), *rest)
        named["epochs"][:, :counters] += 1

    return call


def _combine_kernel(
    plan: Plan, launch: Launch, deployment: "Deployment", kernels: Mapping[Key, Kernel], keys: Keys
) -> Call:
    rows = launch.arguments[argument_names(launch).index("rows")]
    assert isinstance(rows, TensorArgument)
    dtype = plan.buffer_named()[rows.buffer].dtype
    wanted = expert_combine_rmsnorm.serving(deployment.backbone.experts, deployment.tp, plan.rows, dtype)
    key = keys.of(wanted)
    if key not in kernels:
        raise MissingEntriesError(
            where=f"{title(plan)}, launch {launch.name} over torch.distributed",
            found=f"no kernel for {key}",
            needed="every entry of the deployment",
            remedy="Load the deployment's kernels before binding its plans.",
            keys=(str(key),),
        )
    function: Call = kernels[key].function
    return function


def _reference(operation: str) -> tuple[ModuleType, Call]:
    path, name = resolve(operation, load_spec(operation).reference)
    module = importlib.import_module(path)
    return module, getattr(module, name)
