"""A step's exchanges over NCCL, each followed by a kernel of its own: what the fused ones are measured beside.

Ours: NCCL, then our kernel without an exchange, from the pack. Stock: NCCL, then vLLM's; a rank that has whole experts
finishes its rows and adds up whole tokens, as vLLM does with expert parallelism, and rows otherwise, in BF16, as vLLM
does without. The operations take the arguments of the exchange kernels and work on their buffers in place.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jitspark.plans.plan import Launch, Plan, TensorArgument
from jitspark.registry import load_spec
from jitspark.spec import Specialization
from kernel_specs.expert_combine_rmsnorm import spec as expert_combine_rmsnorm

if TYPE_CHECKING:
    import torch

    from bench.rank_group import Ranks

NCCL, STOCK = "nccl", "stock"
BOUNDARIES = ("allreduce_gated_residual_rmsnorm", "allgather_gated_residual_rmsnorm")
COLUMNS, ROWS = "allgather_columns", "expert_reduce_rmsnorm_combine"
EXCHANGED = (  # what no kernel without an exchange takes
    *("inbox", "peers", "epochs", "failure", "rank", "timeout_us"),
    *("row_inbox", "row_peers", "sum_inbox", "sum_peers"),
)

Operation = Callable[..., None]
Operations = dict[tuple[str, str], Operation]


def unfused(plan: Plan, launch: Launch) -> Specialization | None:
    """Our kernel that follows the exchange of `launch` where NCCL exchanges; None where nothing does."""
    if launch.operation == COLUMNS:
        return None
    shapes = {each.name: (each.shape, each.dtype) for each in plan.buffers}
    if launch.operation == ROWS:
        (rows, slots, hidden), dtype = shapes[_buffer(launch, "rows")]
        axes = {"num_partials": 1, "num_experts_per_tok": int(slots), "moe_hidden_size": int(hidden)}
        statics = expert_combine_rmsnorm.split(int(hidden), int(rows), 1)
        return expert_combine_rmsnorm.SPEC.specialize(axes=axes, dtypes={"rows_dtype": dtype}, statics=statics)
    spec = load_spec("gated_residual_rmsnorm")
    (_, hidden), _ = shapes[_buffer(launch, "stream")]
    statics = {name: value for name, value in launch.statics.items() if name in spec.statics}
    return spec.specialize(axes={"hidden_size": int(hidden)}, statics=statics)


def all_unfused(plan: Plan) -> list[Specialization]:
    """Every kernel that `nccl_operations` needs for the plan, each once."""
    made = (unfused(plan, launch) for launch in plan.launches if launch.provider == NCCL)
    return list({each.title(): each for each in made if each is not None}.values())


def nccl_operations(group: "Ranks", kernels: Mapping[str, Callable[..., Any]]) -> Operations:
    """Operations of the provider NCCL; `kernels` by their specialization's title, those of `all_unfused`."""

    def boundary(operation: str, collect: Callable[["torch.Tensor"], "torch.Tensor"]) -> Operation:
        def call(*arguments: Any, **statics: Any) -> None:
            payload, rest = _without_exchange(operation, arguments, statics)
            spec = load_spec("gated_residual_rmsnorm")
            own = {name: value for name, value in statics.items() if name in spec.statics}
            branch = collect(payload)
            served = spec.specialize(axes={"hidden_size": branch.shape[1]}, statics=own)
            kernels[served.title()](branch, *rest)

        return call

    def rows(*arguments: Any, **statics: Any) -> None:
        payload, rest = _without_exchange(ROWS, arguments, statics)
        tokens, slots, hidden = payload.shape
        axes = {"num_partials": 1, "num_experts_per_tok": slots, "moe_hidden_size": hidden}
        dtypes = {"rows_dtype": str(payload.dtype).removeprefix("torch.")}
        served = expert_combine_rmsnorm.SPEC.specialize(
            axes=axes, dtypes=dtypes, statics=expert_combine_rmsnorm.split(hidden, tokens, 1)
        )
        _add_up(payload, group)
        kernels[served.title()](payload[None], *rest)

    made: Mapping[str, Operation] = {
        BOUNDARIES[0]: boundary(BOUNDARIES[0], lambda partial: _add_up(partial, group)),
        BOUNDARIES[1]: boundary(BOUNDARIES[1], lambda shard: _gather(shard, group)),
        COLUMNS: _columns(group),
        ROWS: rows,
    }
    return {(NCCL, name): operation for name, operation in made.items()}


def stock_exchanging(group: "Ranks | None", expert_map: "torch.Tensor | None") -> Operations:
    """All of stock's operations for one executor, with real exchanges, or with copies where there is no group.

    `expert_map` where a rank has whole experts.
    """
    from jitspark.runtime.stock_experts import Experts
    from jitspark.runtime.stock_ops import gated_residual_rmsnorm, stock_operations

    experts = Experts(expert_map)
    if group is None:
        return stock_operations(experts)

    def boundary(operation: str, collect: Callable[["torch.Tensor"], "torch.Tensor"]) -> Operation:
        def call(*arguments: Any, **statics: Any) -> None:
            payload, rest = _without_exchange(operation, arguments, statics)
            gated_residual_rmsnorm(collect(payload), *rest, **statics)

        return call

    def rows(*arguments: Any, **statics: Any) -> None:
        _, rest = _without_exchange(ROWS, arguments, statics)
        topk_ids, topk_weights, _weight, out, _eps = rest
        found = experts.rows(topk_ids, topk_weights)
        if expert_map is None:
            experts.finalize(_add_up(found, group), *rest)
        else:
            experts.finalize(found, *rest)
            _add_up(out, group)

    made: Mapping[str, Operation] = {
        BOUNDARIES[0]: boundary(BOUNDARIES[0], lambda partial: _add_up(partial, group)),
        BOUNDARIES[1]: boundary(BOUNDARIES[1], lambda shard: _gather(shard, group)),
        COLUMNS: _columns(group),
        ROWS: rows,
    }
    return stock_operations(experts) | {(STOCK, name): operation for name, operation in made.items()}


def _buffer(launch: Launch, argument: str) -> str:
    spec = load_spec(launch.operation)
    present = [arg.name for arg in spec.args if arg.when is None or launch.statics[arg.when[0]] == arg.when[1]]
    found = launch.arguments[present.index(argument)]
    assert isinstance(found, TensorArgument)
    return found.buffer


def _without_exchange(operation: str, arguments: Any, statics: Mapping[str, Any]) -> tuple["torch.Tensor", list[Any]]:
    """What is exchanged, and the arguments that a kernel without the exchange takes behind it."""
    spec = load_spec(operation)
    payload: str = importlib.import_module(f"kernel_specs.{operation}.reference").PAYLOAD
    present = [arg.name for arg in spec.args if arg.when is None or statics[arg.when[0]] == arg.when[1]]
    named = dict(zip(present, arguments, strict=True))
    return named[payload], [each for name, each in named.items() if name not in (payload, *EXCHANGED)]


def _add_up(own: "torch.Tensor", group: "Ranks") -> "torch.Tensor":
    """The sum over the ranks, in place."""
    import torch.distributed as dist

    dist.all_reduce(own, group=group.process_group)
    return own


def _gather(shard: "torch.Tensor", group: "Ranks") -> "torch.Tensor":
    """[rows, world * columns]: every rank's columns side by side."""
    import torch
    import torch.distributed as dist

    rows, columns = shard.shape
    every = torch.empty((group.size * rows, columns), dtype=shard.dtype, device=shard.device)
    dist.all_gather_into_tensor(every, shard, group=group.process_group)
    return every.view(group.size, rows, columns).transpose(0, 1).reshape(rows, -1)


def _columns(group: "Ranks") -> Operation:
    def call(*arguments: Any, **statics: Any) -> None:
        shard, (out,) = _without_exchange(COLUMNS, arguments, statics)
        out.copy_(_gather(shard, group))

    return call
