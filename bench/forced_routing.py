"""A step in which every layer routes to exactly so many distinct experts: other experts in each layer, clear choices.

The router is multiplied as always; routing reads logits that were drawn instead of those. So nothing else of the step's
work changes, and how many expert weights are read is known.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from jitspark.plans.plan import READS, Buffer, Kind, Launch, Plan, TensorArgument
from jitspark.plans.reference_executor import argument_names

LOGITS, CHOSEN, DISTINCT = "logits", "topk_ids", "num_distinct_experts"  # arguments of a launch that routes
SCHEDULE = ("route_offsets", CHOSEN)  # what reads one of these needs a routing before it


def routes(launch: Launch) -> bool:
    """Whether the launch routes, alone or besides other work."""
    return DISTINCT in argument_names(launch)


def reads_schedule(launch: Launch) -> bool:
    names = zip(argument_names(launch), launch.arguments, strict=True)
    return any(name in SCHEDULE and getattr(each, "role", "") in READS for name, each in names)


def index_of(launch: Launch, argument: str) -> int:
    return argument_names(launch).index(argument)


def forced(plan: Plan) -> Plan:
    """The plan with `<layer>.forced_logits`, an input, in the place of each layer's router logits."""
    launches, buffers = [], list(plan.buffers)
    known = plan.buffer_named()
    for launch in plan.launches:
        if routes(launch):
            arguments, index = list(launch.arguments), index_of(launch, LOGITS)
            logits = arguments[index]
            assert isinstance(logits, TensorArgument)
            name = forced_name(launch)
            buffers.append(Buffer(name, Kind.INPUT, known[logits.buffer].shape, "float32"))
            arguments[index] = replace(logits, buffer=name)
            launch = replace(launch, arguments=tuple(arguments))  # noqa: PLW2901
        launches.append(launch)
    return replace(plan, launches=tuple(launches), buffers=tuple(buffers))


def forced_name(launch: Launch) -> str:
    """`layers.3.forced_logits`, whichever launch of the layer routes."""
    return f"{'.'.join(launch.name.split('.')[:2])}.forced_logits"


def forced_logits(plan: Plan, distinct: int, generator: Generator) -> dict[str, Tensor]:
    """Logits for a forced plan. Raises ValueError when so many distinct experts are not possible."""
    known = plan.buffer_named()
    made = {}
    for launch in plan.launches:
        if routes(launch):
            rows, experts = (int(size) for size in known[forced_name(launch)].shape)
            topk = launch.arguments[index_of(launch, CHOSEN)]
            assert isinstance(topk, TensorArgument)
            slots = int(known[topk.buffer].shape[1])
            made[forced_name(launch)] = _logits(rows, slots, experts, distinct, generator)
    return made


def _logits(rows: int, slots: int, experts: int, distinct: int, generator: Generator) -> Tensor:
    if not slots <= distinct <= min(experts, rows * slots):
        raise ValueError(f"{rows} rows with {slots} experts each cannot have {distinct} distinct ones of {experts}")
    device = generator.device
    order = torch.randperm(experts, generator=generator, device=device)[:distinct]
    logits = torch.full((rows, experts), -12.0, device=device)
    for row, chosen in enumerate(_deal(rows, slots, distinct)):
        logits[row, order[chosen]] = 2.0 * torch.rand(slots, generator=generator, device=device)
    return logits


def _deal(rows: int, slots: int, distinct: int) -> Iterator[list[int]]:
    """For each row as many different numbers below `distinct`; each number at least once."""
    for row in range(rows):
        yield [(row * slots + slot) % distinct for slot in range(slots)]
