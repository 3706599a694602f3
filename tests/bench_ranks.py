"""Ranks as processes that run the steps bin/bench-decode-ranks times beside ours, by references over gloo.

    python tests/bench_ranks.py KIND SIZE FOLDER

KIND: "nccl", exchanges by torch.distributed's collectives, each with the kernel that follows it; or "whole", whole
experts on each rank, NVFP4 ones and, in layer 0, BF16. Each rank writes FOLDER/RANK.pt: its outputs.
"""

import functools
import importlib
import sys

import decode_ranks
import msgspec
import rank_processes
import torch
import torch.distributed as dist

from bench import expert_parallel, nccl_exchanges
from bench.rank_group import Ranks
from jitspark.checking.plan_arguments import random_step, random_weights
from jitspark.plans.backbone import decode_plan
from jitspark.plans.binding import local_memory
from jitspark.plans.builder import Keys
from jitspark.plans.plan import Kind
from jitspark.plans.reference_executor import ReferenceExecutor
from jitspark.registry import resolve

ROWS = 8 * len(decode_ranks.LENGTHS)


def served(kind, tp):
    made = decode_ranks.served(tp)
    if kind != "whole":
        return made
    experts = msgspec.structs.replace(made.backbone.experts, weight_dtype="nvfp4", bf16_layers=(0,))
    return msgspec.structs.replace(made, backbone=msgspec.structs.replace(made.backbone, experts=experts))


def plan_of(kind, tp):
    deployment = served(kind, tp)
    if tp > 1 and kind == "nccl":
        return decode_plan(deployment, ROWS, "sm_90a", providers={"all_reduce": nccl_exchanges.NCCL})
    plan = decode_plan(deployment, ROWS, "sm_90a")
    if tp == 1:
        return plan
    return expert_parallel.with_whole_experts(plan, deployment.backbone.experts, Keys("sm_90a"))


@functools.cache
def drawn(kind):
    """Weights, inputs and KV caches of a rank alone: the same in every process, and only read."""
    generator = torch.Generator().manual_seed(decode_ranks.SEED)
    plan = plan_of(kind, 1)
    weights = random_weights(plan, generator, max_positions=max(decode_ranks.LENGTHS))
    for name, weight in weights.items():  # as in decode_ranks: branches that weigh little
        if name.endswith(("alpha", "beta")):
            beta = decode_ranks.BETA
            weight.fill_(beta if name.endswith("beta") else (1 - beta**2) ** 0.5)
    return weights, random_step(plan, decode_ranks.LENGTHS, generator)


def share(kind, name, whole, shape, rank, size):
    if kind == "whole" and ".experts." in name and whole.shape[0] > 1:
        return whole.chunk(size)[rank].contiguous()
    return decode_ranks.share(name, whole, shape, rank, size)


def run(kind, rank, size, gather=None):
    """The outputs of a rank's step."""
    plan = plan_of(kind, size)
    weights, step = drawn(kind)
    shapes = {buffer.name: buffer.shape for buffer in plan.buffers}
    given = {**weights, **step.inputs, **step.kv_caches}
    bound = {
        buffer.name: share(kind, buffer.name, given[buffer.name], shapes[buffer.name], rank, size).clone()
        for buffer in plan.buffers
        if buffer.kind in (Kind.WEIGHT, Kind.INPUT, Kind.KV_CACHE)
    }
    if size == 1:
        executor = ReferenceExecutor(plan, bound)
    else:
        experts = served(kind, size).backbone.experts.num_local_experts
        first = expert_parallel.first_expert(experts, rank, size)
        executor = ReferenceExecutor(
            plan,
            bound,
            gather=gather,
            operations=expert_parallel.OPERATIONS,
            instead=collectives(plan, rank, size) if kind == "nccl" else None,
            numbers={"rank": rank, "timeout_us": 0, expert_parallel.FIRST_EXPERT: first},
            symmetric=local_memory(plan, "cpu"),
        )
    executor.run()
    return {name: each.clone() for name, each in executor.outputs.items()}


def collectives(plan, rank, size):
    """What exchanges in the place of references, by operation; references follow instead of kernels."""
    kernels = {each.title(): reference(each) for each in nccl_exchanges.all_unfused(plan)}
    found = nccl_exchanges.nccl_operations(Ranks(rank, size, dist.group.WORLD), kernels)
    return {operation: call for (_, operation), call in found.items()}


def reference(specialization):
    module, name = resolve(specialization.name, specialization.spec.reference)
    return functools.partial(getattr(importlib.import_module(module), name), **specialization.statics)


def run_ranks(folder, size, kind):
    """What each rank ended with, in rank order."""
    return rank_processes.run_ranks(__file__, folder, size, kind)


def main(kind, size, folder):
    torch.set_num_threads(1)
    drawn(kind)  # once for all ranks
    rank_processes.answer_as_ranks(lambda group: run(kind, group.rank, size, group.gather), size, folder)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
