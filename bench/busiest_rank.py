"""Which rank with whole experts a layer waits for, and what a step must read there."""

from collections.abc import Mapping

from bench.decode import Point
from bench.part_times import part_of
from jitspark.checking.plan_arguments import Tensors
from jitspark.plans.costs import Workload, costs
from jitspark.plans.plan import Plan

GROUPED = ("grouped_gemm_swiglu", "grouped_gemm_partial")
UNLIKELY = -11.0  # forced logits below this are those of experts that nobody chose


def busiest_experts(logits: Tensors, ranks: int) -> dict[str, int]:
    """The most distinct experts that a rank with whole ones has in each layer, by the layer's name."""
    made = {}
    for name, each in logits.items():
        chosen = (each > UNLIKELY).any(dim=0)
        made[layer_of(name)] = int(chosen.view(ranks, -1).sum(dim=1).max())
    return made


def busiest_first(logits: Tensors, ranks: int) -> Tensors:
    """The same choices with experts renamed, so that the first rank is the busiest one of every layer."""
    made = {}
    for name, each in logits.items():
        counts = (each > UNLIKELY).any(dim=0).view(ranks, -1).sum(dim=1)
        made[name] = each.roll(-int(counts.argmax()) * (each.shape[1] // ranks), dims=1)
    return made


def layer_of(name: str) -> str:
    """`layers.3` of `layers.3.experts.down`."""
    return ".".join(name.split(".")[:2])


def floor_bytes(plan: Plan, point: Point, busiest: Mapping[str, int]) -> dict[str, float]:
    """What each part must read on the busiest rank of each layer: weights and keys and values seen.

    `busiest` distinct experts by layer where ranks have whole ones; else every rank reads as much.
    """
    found: dict[str, float] = {}
    for launch, cost in zip(plan.launches, costs(plan, Workload(point.context, point.distinct)), strict=True):
        layer = layer_of(launch.name)
        whole = launch.operation.endswith(GROUPED) and layer in busiest
        weights = cost.weights * (busiest[layer] * plan.tp / point.distinct if whole else 1.0)
        part = part_of(launch)
        found[part] = found.get(part, 0.0) + weights + cost.cache
    return found
