"""What each launch of a plan must move through memory, and the time below which it cannot end.

Everything that a launch reads or writes counts once, what it updates twice. Of the experts' weights only those that
some row goes to count, of the KV cache what the rows may see. A floor is bytes over a rate: launches, latencies and
arithmetic are not in it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jitspark.plans.plan import Buffer, Kind, Launch, Plan, TensorArgument
from jitspark.spec import DTYPE_BYTES

READ_RATE = 4.42e12  # bytes a second: 2 GiB read on an H200, measured

SCHEDULED = "route_offsets"  # a launch that reads it multiplies the experts that some row goes to
EMBEDDING = "markov_w1"  # a weight of which each row reads its own entry
APPEND, ATTENTION = "qk_rmsnorm_rope_paged_kv_append", "paged_gqa_verify_attention"


@dataclass(frozen=True, slots=True)
class Workload:
    """What a plan leaves open: keys per request, how many experts the rows of a step go to, bytes a second.

    distinct_experts: None is what independent, evenly distributed routes come to.
    """

    context: int = 32768
    distinct_experts: float | None = None
    rate: float = READ_RATE


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes of one launch: of weights, of the KV cache, of everything else."""

    weights: float
    cache: float
    rest: float

    @property
    def total(self) -> float:
        return self.weights + self.cache + self.rest

    def seconds(self, rate: float) -> float:
        """The floor."""
        return self.total / rate


def costs(plan: Plan, workload: Workload) -> list[Cost]:
    """The cost of each launch, in order."""
    named = plan.buffer_named()
    return [_cost(plan, launch, named, workload) for launch in plan.launches]


def expected_experts(rows: int, experts: int, per_row: int) -> float:
    """How many of `experts` the rows go to, if each goes to `per_row` of them at random."""
    return experts * (1 - (1 - per_row / experts) ** rows)


def _cost(plan: Plan, launch: Launch, named: Mapping[str, Buffer], workload: Workload) -> Cost:
    share = _expert_share(plan, launch, named, workload)
    found = {"weights": 0.0, "cache": 0.0, "rest": 0.0}
    for argument in launch.tensors():
        buffer = named[argument.buffer]
        kind = {Kind.WEIGHT: "weights", Kind.KV_CACHE: "cache"}.get(buffer.kind, "rest")
        found[kind] += _bytes(plan, launch, argument, buffer, workload) * (share if kind == "weights" else 1)
    return Cost(**found)


def _expert_share(plan: Plan, launch: Launch, named: Mapping[str, Buffer], workload: Workload) -> float:
    """The part of a grouped GEMM's weights that is read; all of any other's."""
    if SCHEDULED not in {each.buffer for each in launch.tensors() if each.role == "in"}:
        return 1.0
    experts, per_row = int(named[SCHEDULED].shape[0]) - 1, int(named["routes"].shape[1])
    distinct = workload.distinct_experts
    return (expected_experts(plan.rows, experts, per_row) if distinct is None else min(distinct, experts)) / experts


def _bytes(plan: Plan, launch: Launch, argument: TensorArgument, buffer: Buffer, workload: Workload) -> float:
    # of an inbox's two halves one is read, and zeroed again
    times = 2 if argument.role == "inout" and buffer.kind is not Kind.SYMMETRIC else 1
    size = DTYPE_BYTES[buffer.dtype]
    if buffer.kind is Kind.KV_CACHE:
        _, heads, _, width = map(_number, buffer.shape)
        return _tokens(plan, launch, workload) * heads * width * size
    if buffer.name == EMBEDDING or any(isinstance(each, str) for each in buffer.shape):
        # a table of which each row or request reads its own entries
        return plan.rows * size * math.prod(each for each in buffer.shape[1:] if isinstance(each, int))
    return times * size * math.prod(map(int, buffer.shape))


def _tokens(plan: Plan, launch: Launch, workload: Workload) -> int:
    """Tokens whose keys and values a launch reads or writes, over all requests."""
    if launch.operation != ATTENTION:
        return plan.rows
    window = int(launch.statics["sliding_window"])
    visible = min(workload.context, window + plan.query_length - 1) if window else workload.context
    return visible * (plan.rows // plan.query_length)


def _number(size: int | str) -> int:
    return size if isinstance(size, int) else 0
