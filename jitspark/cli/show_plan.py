"""`jitspark plan`: one plan for people, as JSON, and drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_tools.command_line import answer, answer_json, say
from cache_tools.roots import readable_layers
from cache_tools.table import table
from jitspark.errors import UsageError
from jitspark.plans.costs import Cost, Workload, costs
from jitspark.plans.plan import Launch, Plan, Stage
from jitspark.plans.planning import Plans, Served
from jitspark.plans.request import PlanRequest
from jitspark.plans.weights_contract import Need, contract, held
from jitspark.settings import Settings

MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class View:
    """What to show, apart from the plan: each launch or those alike together, its weights, and where to draw it."""

    workload: Workload
    every_launch: bool = False
    weights: bool = False
    as_json: bool = False
    drawing: Path | None = None


def show_plan(served: Served, stage: str, rows: int | None, settings: Settings, view: View) -> None:
    """Print the plan for `rows` rows, or for one request; it is the cache's if it is there, and stored nowhere.

    Raises UsageError for a stage or rows that no plan serves, and what making a plan does.
    """
    request = requested(served, stage, rows)
    plan = _stored(served, request, settings) or Plans(served, []).make(request)
    found = costs(plan, view.workload)
    if view.drawing is not None:
        from jitspark.cli.draw_plan import draw

        draw(plan, found, view.workload, view.drawing)
        say(str(view.drawing))
    if view.as_json:
        answer_json(plan_json(plan, found, view.workload))
        return
    for line in weight_lines(plan) if view.weights else lines(plan, found, view):
        answer(line)


def _stored(served: Served, request: PlanRequest, settings: Settings) -> Plan | None:
    layers = readable_layers(settings)
    there = Plans(served, layers, may_make=False)
    return there.get(request) if there.has(request) else None


def requested(served: Served, stage: str, rows: int | None) -> PlanRequest:
    """What to ask for a stage's plan by; None: rows of one request. Raises UsageError for one that is not served."""
    every = [each for each in served.requests() if each.stage.value == stage]
    if not every:
        raise _usage("--stage", stage, f"one of {', '.join(Stage)}")
    served_rows = sorted({each.rows for each in every})
    wanted = every[0].rows_of_one if rows is None else rows
    found = next((each for each in every if each.rows == wanted), None)
    if found is None:
        raise _usage("--m", f"{wanted} rows", f"one of {', '.join(map(str, served_rows))} for a {stage} plan")
    return found


def lines(plan: Plan, found: Sequence[Cost], view: View) -> Iterator[str]:
    """The plan for people."""
    workload = view.workload
    yield f"{plan.stage} plan of {plan.geometry} at TP {plan.tp}, {plan.rows} rows, for {plan.target} on {plan.host}"
    yield f"  {len(plan.launches)} launches of {len(plan.keys())} kernels over {len(plan.buffers)} buffers"
    yield f"  workspace {plan.workspace_bytes} bytes, symmetric memory {plan.symmetric_bytes} bytes"
    yield f"  {workload.context} keys a request, {workload.rate / 1e12:.2f} TB/s"
    rows = _every(plan, found, workload) if view.every_launch else _alike(plan, found, workload)
    yield from table(("launch", "times", "operation", "provider", "key", "bytes", "floor us"), rows)
    total = sum(each.total for each in found)
    yield from _parts(plan, found, workload)
    yield f"total {total / 1e6:.1f} MB, floor {total / workload.rate * MICROSECONDS:.1f} us"


def weight_lines(plan: Plan) -> Iterator[str]:
    """The plan's weights contract for people: what it needs, from where, and how many bytes that holds."""
    needs = contract([plan])
    groups: dict[tuple[object, ...], list[Need]] = {}
    for need in needs:
        source = need.source
        way = (source.layout, source.tap, "vLLM's" if source.shared else "twice")
        groups.setdefault((_place(need.name), *way, need.shape, need.dtype), []).append(need)
    rows = [_weight_row(str(place), way, alike) for (place, *way, _, _), alike in groups.items()]
    yield from table(("weight", "times", "layout", "tap", "held", "shape", "dtype", "bytes", "first tensor"), rows)
    both = held(needs)
    yield f"{both.shared / 1e9:.2f} GB of vLLM's own memory, {both.twice / 1e9:.2f} GB held twice"


def _weight_row(place: str, way: Sequence[object], alike: Sequence[Need]) -> tuple[object, ...]:
    first = alike[0]
    span = _span([each.name for each in alike], place)
    return span, len(alike), *way, str(list(first.shape)), first.dtype, first.nbytes, first.source.tensor


def _parts(plan: Plan, found: Sequence[Cost], workload: Workload) -> Iterator[str]:
    by_part: dict[str, list[float]] = {}
    for launch, cost in zip(plan.launches, found, strict=True):
        by_part.setdefault(launch.part, []).append(cost.seconds(workload.rate))
    rows = [(part, len(each), sum(each) * MICROSECONDS) for part, each in by_part.items()]
    yield from table(("part", "launches", "floor us"), rows)


def _every(plan: Plan, found: Sequence[Cost], workload: Workload) -> list[tuple[object, ...]]:
    return [_row(launch.name, 1, launch, cost, workload) for launch, cost in zip(plan.launches, found, strict=True)]


def _alike(plan: Plan, found: Sequence[Cost], workload: Workload) -> list[tuple[object, ...]]:
    """Launches of one key that stand at the same place of a layer and move as many bytes, together."""
    groups: dict[tuple[str, str, str], list[tuple[Launch, Cost]]] = {}
    for launch, cost in zip(plan.launches, found, strict=True):
        groups.setdefault((_place(launch.name), str(launch.key), repr(cost)), []).append((launch, cost))
    return [
        _row(_span([launch.name for launch, _ in each], place), len(each), *each[0], workload)
        for (place, _, _), each in groups.items()
    ]


def _place(name: str) -> str:
    """Where a launch or a weight stands within its layer."""
    return ".".join(name.split(".")[2:]) if name.startswith("layers.") else name


def _span(names: Sequence[str], place: str) -> str:
    """The names of one place in several layers as one."""
    if not names[0].startswith("layers."):
        return place
    first, last = names[0].split(".")[1], names[-1].split(".")[1]
    return f"layers.{first}{'' if first == last else f'..{last}'}.{place}"


def _row(name: str, times: int, launch: Launch, cost: Cost, workload: Workload) -> tuple[object, ...]:
    key = "-" if launch.key is None else launch.key.recipe[:12]
    floor = cost.seconds(workload.rate) * MICROSECONDS
    return name, times, launch.operation, launch.provider, key, round(cost.total), floor


def plan_json(plan: Plan, found: Sequence[Cost], workload: Workload) -> dict[str, Any]:
    """The plan as one JSON object: its launches with keys, bytes and floors, and the totals."""
    total, keys = sum(each.total for each in found), plan.keys()
    return {
        "stage": plan.stage.value,
        "geometry": plan.geometry,
        "tp": plan.tp,
        "rows": plan.rows,
        "target": plan.target,
        "host": plan.host,
        "workspace_bytes": plan.workspace_bytes,
        "symmetric_bytes": plan.symmetric_bytes,
        "context": workload.context,
        "bytes_per_second": workload.rate,
        "bytes": round(total),
        "floor_us": total / workload.rate * MICROSECONDS,
        "keys": [key.path for key in keys],
        "launches": [_launch_json(*each, workload) for each in zip(plan.launches, found, strict=True)],
        "buffers": [
            {
                "name": each.name,
                "kind": each.kind.value,
                "shape": each.shape,
                "dtype": each.dtype,
                "offset": each.offset,
            }
            for each in plan.buffers
        ],
    }


def _launch_json(launch: Launch, cost: Cost, workload: Workload) -> dict[str, Any]:
    return {
        "name": launch.name,
        "part": launch.part,
        "provider": launch.provider,
        "operation": launch.operation,
        "key": None if launch.key is None else launch.key.path,
        "statics": dict(launch.statics),
        "bytes": {"weights": round(cost.weights), "kv_cache": round(cost.cache), "rest": round(cost.rest)},
        "floor_us": cost.seconds(workload.rate) * MICROSECONDS,
    }


def _usage(where: str, found: str, needed: str) -> UsageError:
    return UsageError(where=where, found=found, needed=needed, remedy="Correct this option.")
