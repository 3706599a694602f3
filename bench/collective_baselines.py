"""What else does the work of the fused exchanges: NCCL or torch's one-shot all-reduce, then a norm on its own."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.collective_cases import unfused
from bench.rank_group import Ranks
from bench.rank_world import Values, World

Calls = dict[str, Callable[[], None]]
Kernels = Mapping[str, Callable[..., Any]]  # by a specialization's title

EXCHANGED = (
    *("inbox", "peers", "epochs", "failure", "rank", "timeout_us"),
    *("row_inbox", "row_peers", "sum_inbox", "sum_peers"),
)


def baselines(world: World, values: Values, group: Ranks, kernels: Kernels) -> Calls:
    """By name, each with memory of its own; none where ranks have no GPUs."""
    if values[world.payload].device.type == "cpu":
        return {}
    make = {
        "allreduce_gated_residual_rmsnorm": _all_reduce,
        "allgather_gated_residual_rmsnorm": _all_gather,
        "allgather_columns": _columns,
        "expert_reduce_rmsnorm_combine": _experts,
    }[world.specialization.name]
    follower = unfused(world.specialization)
    return make(dict(values), group, None if follower is None else kernels[follower.title()])


def _all_reduce(values: Values, group: Ranks, norm: Any) -> Calls:
    from torch.distributed import _symmetric_memory as symmetric

    branch = torch.zeros_like(values["partial"])
    shared = symmetric.empty(tuple(branch.shape), dtype=branch.dtype, device=branch.device).zero_()
    symmetric.rendezvous(shared, group.process_group)
    one_shot = partial(torch.ops.symm_mem.one_shot_all_reduce, shared, "sum", group.process_group.group_name)
    after = _norm(values, "partial", norm)
    nccl = partial(dist.all_reduce, branch, group=group.process_group)
    return {
        "NCCL": nccl,
        "one-shot": one_shot,
        "norm": lambda: after(branch),
        "NCCL + norm": lambda: (nccl(), after(branch))[1],
        "one-shot + norm": lambda: after(one_shot()),
    }


def _all_gather(values: Values, group: Ranks, norm: Any) -> Calls:
    after, gathered = _norm(values, "shard", norm), _gather(values["shard"], group)
    branch = gathered()
    return {"NCCL": gathered, "norm": lambda: after(branch), "NCCL + norm": lambda: after(gathered())}


def _columns(values: Values, group: Ranks, _: Any) -> Calls:
    return {"NCCL": _gather(values["shard"], group)}


def _experts(values: Values, group: Ranks, combine: Any) -> Calls:
    rows = torch.zeros_like(values["rows"])
    tail = [values[name] for name in ("topk_ids", "topk_weights", "weight", "out", "eps")]
    nccl = partial(dist.all_reduce, rows, group=group.process_group)
    after = partial(combine, rows[None], *tail)
    return {"NCCL": nccl, "combine": after, "NCCL + combine": lambda: (nccl(), after())[1]}


def _norm(values: Values, payload: str, norm: Any) -> Callable[[torch.Tensor], None]:
    tail = [value for name, value in values.items() if name not in (payload, *EXCHANGED)]
    return lambda branch: norm(branch, *tail)


def _gather(shard: torch.Tensor, group: Ranks) -> Callable[[], torch.Tensor]:
    """Every rank's columns side by side: an all-gather, and a copy into rows."""
    every = torch.zeros((group.size, *shard.shape), dtype=shard.dtype, device=shard.device)
    whole = torch.empty((shard.shape[0], group.size, shard.shape[1]), dtype=shard.dtype, device=shard.device)

    def gathered() -> torch.Tensor:
        dist.all_gather_into_tensor(every, shard, group=group.process_group)
        whole.copy_(every.transpose(0, 1))
        return whole.view(shard.shape[0], -1)

    return gathered
