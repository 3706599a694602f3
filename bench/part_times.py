"""Times of a step's launches by part or by operation, each kind of all layers in a graph of its own."""

from collections.abc import Callable, Mapping, Sequence

from bench.forced_routing import reads_schedule, routes
from bench.timing import Timing
from jitspark.plans.bound_plan import BoundPlan
from jitspark.plans.plan import Launch

Timed = Callable[[Mapping[str, Callable[[], None]]], Mapping[str, Timing]]  # runs by name -> what each took


def parts(executor: BoundPlan, name_of: Callable[[Launch], str], timed: Timed) -> dict[str, float]:
    """Microseconds of the launches that `name_of` names alike, of all layers, without the others between them.

    What routes is launched with what reads its schedule, which must be one; what others name it is taken off again.
    """
    launches = executor.plan.launches
    names = dict.fromkeys(map(name_of, launches))
    scheduled = {name_of(each) for each in launches if reads_schedule(each)}
    others = {name: [each for each in launches if routes(each) and name_of(each) != name] for name in scheduled}
    kept = {
        name: [each for each in launches if name_of(each) == name or (name in scheduled and routes(each))]
        for name in names
    }
    runs = {name: _launching(executor, chosen) for name, chosen in kept.items()}
    runs |= {f"before {name}": _launching(executor, chosen) for name, chosen in others.items() if chosen}
    times = {name: each.median_us for name, each in timed(runs).items()}
    return {name: times[name] - times.get(f"before {name}", 0.0) for name in names}


def part_of(launch: Launch) -> str:
    """The experts' rows are combined by the experts' provider, whoever brings them together."""
    return "experts" if launch.operation == "expert_reduce_rmsnorm_combine" else launch.part


def _launching(executor: BoundPlan, launches: Sequence[Launch]) -> Callable[[], None]:
    def run() -> None:
        for launch in launches:
            executor.launch(launch)

    return run
