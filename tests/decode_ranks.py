"""Ranks as processes that run a decode step by its references, each with its shares of one set of weights, over gloo.

    python tests/decode_ranks.py EXCHANGES SIZE FOLDER

EXCHANGES: "references", or "gathered": a gather, and then what stands for the exchange's kernel (its reference, which
sends as the kernel does). Each rank writes FOLDER/RANK.pt: its outputs.
"""

import functools
import importlib
import sys
from functools import partial
from types import SimpleNamespace

import msgspec
import rank_processes
import torch

from jitspark.checking.plan_arguments import random_step, random_weights
from jitspark.geometry import deployment
from jitspark.plans.backbone import decode_plan
from jitspark.plans.binding import Binding, SymmetricMemory, local_memory
from jitspark.plans.bound_plan import BoundPlan, operation_call
from jitspark.plans.plan import Kind
from jitspark.plans.reference_executor import ReferenceExecutor
from jitspark.registry import kernel_names, load_spec, resolve
from jitspark.runtime.distributed_exchanges import gathered_first
from kernel_specs.expert_combine_rmsnorm.reference import expert_combine_rmsnorm

LENGTHS = (40, 72, 8)  # of requests
SEED = 5
BETA = 0.1


def served(tp):
    """The tiny deployment, with as many heads as eight ranks can share, at any TP size."""
    tiny = deployment("tiny", 1)
    backbone = tiny.backbone
    attention = msgspec.structs.replace(backbone.attention, num_attention_heads=16, num_key_value_heads=8)
    experts = msgspec.structs.replace(backbone.experts, moe_hidden_size=512, moe_intermediate_size=1024)
    wider = msgspec.structs.replace(backbone, attention=attention, experts=experts, tp_sizes=(1, 2, 4, 8))
    return msgspec.structs.replace(tiny, backbone=wider, tp=tp)


def plan_of(tp):
    return decode_plan(served(tp), 8 * len(LENGTHS), "sm_90a")


@functools.cache
def drawn():
    """Weights, inputs and KV caches of a rank alone: the same in every process, and only read."""
    generator = torch.Generator().manual_seed(SEED)
    plan = plan_of(1)
    weights = random_weights(plan, generator, max_positions=max(LENGTHS))
    # Random attention and routing are all or nothing, and multiply what rounding does to their input by ten a layer:
    # branches that weigh little keep ranks comparable over four layers.
    for name, weight in weights.items():
        if name.endswith(("alpha", "beta")):
            weight.fill_(BETA if name.endswith("beta") else (1 - BETA**2) ** 0.5)
    return weights, random_step(plan, LENGTHS, generator)


def share(name, whole, shape, rank, size):
    """A rank's part of a tensor, which has `shape`: along the one axis that is shorter, segment by segment."""
    shorter = [axis for axis, found in enumerate(shape) if not isinstance(found, str) and found < whole.shape[axis]]
    if not shorter:
        return whole
    (axis,) = shorter
    assert whole.shape[axis] == size * shape[axis], name
    parts = [each.chunk(size, dim=axis)[rank] for each in whole.split(segments(name, whole.shape[axis]), dim=axis)]
    return torch.cat(parts, dim=axis).contiguous()


def segments(name, rows):
    """[q, k, v, gate] and [gate, up] are cut each for itself."""
    attention = served(1).backbone.attention
    if "qkv" in name:
        query, key = attention.query_width(1), attention.key_value_width(1)
        return [query, key, key, query]
    return [rows // 2, rows // 2] if "w13" in name or "gate_up" in name else [rows]


def run(rank, size, gather=None, *, exchanges="references"):
    """The outputs of a rank's step, and what it leaves in the inboxes."""
    plan = plan_of(size)
    weights, step = drawn()
    shapes = {buffer.name: buffer.shape for buffer in plan.buffers}
    given = {**weights, **step.inputs, **step.kv_caches}
    bound = {
        buffer.name: share(buffer.name, given[buffer.name], shapes[buffer.name], rank, size).clone()
        for buffer in plan.buffers
        if buffer.kind in (Kind.WEIGHT, Kind.INPUT, Kind.KV_CACHE)
    }
    numbers = {"rank": rank, "timeout_us": 0} if size > 1 else {}
    if exchanges == "gathered":
        executor = gathered(plan, rank, numbers, gather)
        executor.bind(bound)
    else:
        symmetric = local_memory(plan, "cpu") if size > 1 else None
        executor = ReferenceExecutor(plan, bound, "cpu", gather=gather, numbers=numbers, symmetric=symmetric)
    executor.run()
    left = {name: each for name, each in executor.tensors.items() if name.endswith("inbox")}
    assert not any(bool(each.any()) for each in left.values()), "the next exchange but one would find it"
    return {name: each.clone() for name, each in executor.outputs.items()}


def gathered(plan, rank, numbers, gather):
    """The plan as an executor has it over torch.distributed, with references for kernels."""
    memory, addresses = torch.zeros(plan.symmetric_bytes, dtype=torch.uint8), [0] * plan.tp
    addresses[rank] = memory.data_ptr()
    binding = Binding(plan, "cpu", numbers=numbers, symmetric=SymmetricMemory(memory, tuple(addresses)))
    instead = gathered_first(plan, served(plan.tp), Combining(), gather)
    calls = {each.name: instead(each, own_part(plan, each)) for each in plan.launches}
    return BoundPlan(binding, calls)


def own_part(plan, launch):
    """The reference of a launch that finds the other ranks' packets in its inbox."""
    if launch.operation not in kernel_names():
        return operation_call(plan, launch, {})
    path, name = resolve(launch.operation, load_spec(launch.operation).reference)
    return partial(getattr(importlib.import_module(path), name), **launch.statics)


class Combining(dict):
    """Kernels that combine partial rows, whichever is asked for."""

    def __contains__(self, key):
        return key.kernel == "expert_combine_rmsnorm"

    def __getitem__(self, key):
        return SimpleNamespace(function=expert_combine_rmsnorm)


def run_ranks(folder, size, exchanges):
    """What each rank ended with, in rank order."""
    return rank_processes.run_ranks(__file__, folder, size, exchanges)


def main(exchanges, size, folder):
    def work(group):
        gather = group.gather if exchanges == "references" else group.gather_in_stream
        return run(group.rank, size, gather, exchanges=exchanges)

    torch.set_num_threads(1)
    drawn()  # once for all ranks
    rank_processes.answer_as_ranks(work, size, folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
