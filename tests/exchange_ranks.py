"""Ranks as processes that exchange over gloo: every operation by its reference, and memory for plans, agreed on or not.

    python tests/exchange_ranks.py TASK SIZE FOLDER

TASK: a function of this module. Each rank writes FOLDER/RANK.pt: outputs by operation, an error's class and text, or
what it was given.
"""

import contextlib
import importlib
import logging
import sys
from functools import partial
from types import SimpleNamespace

import rank_processes
import torch

from bench.rank_world import draw_world
from jitspark.errors import JitsparkError
from jitspark.plans.plan import CUTE, Launch
from jitspark.registry import load_spec, resolve
from jitspark.runtime.distributed_exchanges import (
    EXCHANGES,
    EXPERT_REDUCE,
    distributed_operations,
    gathered_first,
)
from jitspark.runtime.mapped_memory import PeerMemory
from jitspark.runtime.symmetric_memory import exchange_memory

ROUNDS = 2
KERNELS_OWN = [name for name in EXCHANGES if name != EXPERT_REDUCE]  # whose own kernel ends the exchange


def worlds(size, names=EXCHANGES):
    """Small worlds of each operation, of each number of shots that it has, the same in every process."""
    for name in names:
        spec = load_spec(name)
        fitting = [case for case in spec.cases if case.axes["world_size"] == size]
        for shots in sorted({case.statics.get("shots", 1) for case in fitting}):
            alike = [case for case in fitting if case.statics.get("shots", 1) == shots]
            case = min(alike, key=lambda case: (max(case.axes.values()), case.axes["num_tokens"] == 1))
            yield draw_world(spec.specialize_case(case), case.axes, seed=11, rounds=ROUNDS, device="cpu")


def exchanges(group):
    """What this rank ends with in each round, from nothing but its own payload and what gloo brings."""
    operations = distributed_operations("stock", group.gather)
    return rounds(group, EXCHANGES, lambda name, _: operations["stock", name])


def gathered(group):
    """The same with what a served model has in the place of kernels; the references stand for these."""
    instead = gathered_first(SimpleNamespace(target="sm_90a"), None, {}, group.gather_in_stream)

    def served(name, statics):
        spec = load_spec(name)
        path, function = resolve(name, spec.reference)
        kernel = partial(getattr(importlib.import_module(path), function), **statics)
        call = instead(Launch(name, "all_reduce", CUTE, name, None, (), statics), kernel)
        return lambda *arguments, **_: call(*arguments)

    return rounds(group, KERNELS_OWN, served)


def rounds(group, names, served):
    found = {}
    for world in worlds(group.size, names):
        values = world.values(group.rank, 0)
        first = {name: values[name].clone() for name in world.written}
        for number in range(ROUNDS):
            for name, value in first.items():
                values[name].copy_(value)
            values[world.payload].copy_(world.rounds[number][group.rank])
            name = world.specialization.name
            statics = world.specialization.statics
            served(name, statics)(*values.values(), **statics)
            found[world.specialization.title(), number] = {key: values[key].clone() for key in world.written}
    return found


def unequal_plans(group):
    return asked(group, plans_for(group.size, 8 if group.rank else 16))


def unmappable(group):
    return asked(group, plans_for(group.size, 8), peer_memory=barred(group))


def unmappable_auto(group):
    return given(group, exchanges="auto", peer_memory=barred(group))


def waiting_auto(group):
    """Rank 1 cannot map, and rank 0 waits for it within torch's call meanwhile."""
    return given(group, exchanges="auto", peer_memory=barred(group, waited_in_vain))


def no_memory_to_map(group):
    """Rank 1 has no memory for what all would map."""

    def make(num_bytes, device):
        if group.rank == 1:
            raise RuntimeError("CUDA driver error: out of memory")
        return on_cpu(num_bytes, device)

    def addresses(*_):
        raise AssertionError("a rank without memory is waited for in there")

    return asked(group, plans_for(group.size, 8), exchanges="auto", peer_memory=PeerMemory(make, addresses))


def waited_in_vain():
    raise torch.distributed.DistStoreError("wait timeout after 30000ms")


def told(group):
    def make(*_):
        raise AssertionError("there was no need to")

    return given(group, exchanges="torch_distributed", peer_memory=PeerMemory(make))


def unlike_choices(group):
    return asked(group, plans_for(group.size, 8), exchanges="auto" if group.rank else "torch_distributed")


def without_memory(group):
    """Rank 1 has no memory for what torch.distributed brings."""
    plans = plans_for(group.size, 8)
    if group.rank == 1:
        torch.zeros = refused  # for good: this process ends soon
    return asked(group, plans, exchanges="torch_distributed")


def refused(*_, **__):
    raise torch.OutOfMemoryError("no memory for an inbox")


def barred(group, wait=lambda: None):
    """Maps on all ranks but 1; the others `wait` for it."""

    def addresses(*_):
        if group.rank == 1:
            raise RuntimeError("no way to rank 0")
        wait()
        return (0,) * group.size

    return PeerMemory(on_cpu, addresses)


def on_cpu(num_bytes, device):
    return torch.zeros(num_bytes, dtype=torch.uint8, device=device)


def given(group, **options):
    """What a rank got: its warnings, its own place among the addresses, and what a gather brings."""
    (plan,) = plans_for(group.size, 8)
    with warnings_kept() as said:
        memory = exchange_memory([plan], group, "cpu", (1, 2), **options)
    region = memory.of(plan)
    own = [rank for rank, address in enumerate(region.addresses) if address == region.local.data_ptr()]
    region.local.fill_(1)
    apart = min(abs(each - region.local.data_ptr()) for rank, each in enumerate(region.addresses) if rank not in own)
    gathered = memory.gather(torch.tensor([group.rank, 7])).tolist()
    return {"said": said, "own": own, "apart": apart >= plan.symmetric_bytes, "gathered": gathered}


@contextlib.contextmanager
def warnings_kept():
    kept = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())
    logging.getLogger("jitspark").addHandler(handler)
    yield kept


def plans_for(size, rows):
    from jitspark.geometry import deployment
    from jitspark.plans.backbone import decode_plan

    return [decode_plan(deployment("tiny", size), rows, "sm_90a")]


def asked(group, plans, **options):
    try:
        exchange_memory(plans, group, "cpu", (1, 2), **options)
    except (JitsparkError, torch.OutOfMemoryError) as error:
        return type(error).__name__, str(error)
    return None


def run_ranks(task, folder, size):
    """What each rank wrote, in rank order."""
    return rank_processes.run_ranks(__file__, folder, size, task)


if __name__ == "__main__":
    rank_processes.answer_as_ranks(globals()[sys.argv[1]], int(sys.argv[2]), sys.argv[3])
