"""A plan as a picture: where its floor goes, layer by layer, and how its workspace is reused. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitspark.errors import UsageError
from jitspark.plans.buffer_planner import intervals
from jitspark.plans.builder import nbytes
from jitspark.plans.costs import Cost, Workload
from jitspark.plans.plan import Kind, Plan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = (".svg", ".png", ".pdf")
SHOWN_LAUNCHES = 60  # of the workspace's picture: some layers look like all
NAMED = 0.02  # of the workspace: smaller buffers have no room for a name


def draw(plan: Plan, costs: Sequence[Cost], workload: Workload, path: Path) -> None:
    """Write the picture to `path`, in the format that its ending names. Raises UsageError for others, or without it."""
    if path.suffix not in FORMATS:
        raise _usage(f"{path.name!r}", f"a file ending in {', '.join(FORMATS)}", "Name another file.")
    plt = _matplotlib()
    figure, (above, below) = plt.subplots(2, 1, figsize=(13, 9), layout="constrained")
    _floors(above, plan, costs, workload)
    _workspace(below, plan)
    figure.suptitle(f"{plan.stage} plan of {plan.geometry}, TP {plan.tp}, {plan.rows} rows, {plan.target}")
    try:
        figure.savefig(path, dpi=120)
    except OSError as problem:
        raise _usage(
            f"{path}: {problem.strerror}", "a file that can be written", "Name one in a folder that exists."
        ) from problem
    finally:
        plt.close(figure)


def _matplotlib() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise _usage(
            "no matplotlib here", "matplotlib, to draw", "Install jitspark[plot], or leave --draw out."
        ) from None
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _floors(axes: "Axes", plan: Plan, costs: Sequence[Cost], workload: Workload) -> None:
    """A bar for each layer, and one for what stands outside of layers, cut by part."""
    parts = list(dict.fromkeys(launch.part for launch in plan.launches))
    layers = list(dict.fromkeys(map(_layer, (launch.name for launch in plan.launches))))
    bottom = [0.0] * len(layers)
    for part in parts:
        heights = [0.0] * len(layers)
        for launch, cost in zip(plan.launches, costs, strict=True):
            if launch.part == part:
                heights[layers.index(_layer(launch.name))] += cost.seconds(workload.rate) * 1e6
        axes.bar(range(len(layers)), heights, bottom=bottom, label=part, width=0.8)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    step = max(1, len(layers) // 24)
    axes.set_xticks(range(0, len(layers), step), layers[::step])
    axes.set_xlabel("layer")
    axes.set_ylabel(f"floor at {workload.rate / 1e12:.2f} TB/s, us")
    axes.set_title(f"{sum(bottom):.0f} us for {len(plan.launches)} launches, {workload.context} keys a request")
    axes.legend(ncols=len(parts), fontsize="small")


def _layer(name: str) -> str:
    return name.split(".")[1] if name.startswith("layers.") else name


def _workspace(axes: "Axes", plan: Plan) -> None:
    """Each workspace buffer where it lies, for the launches in which it is alive."""
    alive = intervals(plan.launches)
    shown = min(SHOWN_LAUNCHES, len(plan.launches))
    for index, buffer in enumerate(each for each in plan.buffers if each.kind is Kind.WORKSPACE):
        low, high = buffer.offset / 1e6, (buffer.offset + nbytes(buffer)) / 1e6
        for number, (start, end) in enumerate(alive.get(buffer.name, ())):
            right = min(end, shown - 1) + 0.5
            if start < shown:
                axes.fill_between([start - 0.5, right], low, high, color=f"C{index % 10}", alpha=0.6, edgecolor="black")
            if not number and start < shown and nbytes(buffer) > NAMED * plan.workspace_bytes:
                axes.annotate(buffer.name, (start - 0.4, (low + high) / 2), fontsize=6, va="center")
    axes.set_xlim(-0.5, shown - 0.5)
    axes.set_ylim(0, plan.workspace_bytes / 1e6)
    axes.set_xlabel(f"launch (the first {shown} of {len(plan.launches)})")
    axes.set_ylabel("place in the workspace, MB")
    axes.set_title(f"workspace of {plan.workspace_bytes / 1e6:.2f} MB")


def _usage(found: str, needed: str, remedy: str) -> UsageError:
    return UsageError(where="--draw", found=found, needed=needed, remedy=remedy)
