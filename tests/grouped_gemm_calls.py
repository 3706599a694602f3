"""References of the experts' products, called once, and what their random schedules ask of each route."""

import torch

from jitspark.checking.arguments import allocate, draw_arguments, reference_function

CPU = torch.device("cpu")


def called(specialization, case, seed):
    """What was drawn, and every argument by name after the reference ran."""
    draw = dict(draw_arguments(specialization, case.axes, torch.Generator().manual_seed(seed)))
    arguments = allocate(specialization, case.axes, draw, CPU)
    arguments.fill(draw)
    reference_function(specialization)(*arguments.values(), **specialization.statics)
    return draw, dict(zip([arg.name for arg in specialization.args], arguments.values(), strict=True))


def expert_of_route(got):
    """Read off the schedule: the place among the local experts of each route's expert, or None."""
    offsets, experts = got["route_offsets"].tolist(), {}
    for i, expert in enumerate(got["expert_ids"].tolist()):
        for route in got["routes"].flatten().tolist()[offsets[i] : offsets[i + 1]]:
            assert route not in experts
            experts[route] = expert - got["first_expert"]
    local = range(got["weight"].shape[0])
    return [experts[r] if experts.get(r) in local else None for r in range(got["routes"].numel())]
