"""Medians of launches inside CUDA graphs, and the read floor that they are held against."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from jitspark.checking.check import cuda_graph

GRAPH_US = 3000.0  # a graph lasts at least about this long, so that starting it (some 5 us) does not show
FLOOR_BYTES = 2 * 2**30

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds per launch over several replays of one graph."""

    median_us: float
    p10_us: float
    p90_us: float
    launches: int
    replays: int


def launches_for(calls: int, estimate_us: float) -> int:
    """How many launches a graph holds: whole rounds over `calls`, lasting about GRAPH_US if one takes `estimate_us`."""
    rounds = max(1, round(GRAPH_US / (calls * estimate_us)))
    return rounds * calls


def chain(calls: Sequence[Call], launches: int, kinds: int = 1) -> Callable[[], None]:
    """A replay of `launches` launches, which go over `calls` in turn.

    The first `kinds` calls, one of each function, run before the capture, so that nothing is compiled within it.
    """
    for call in calls[:kinds]:
        call()
    torch.cuda.synchronize()

    def everything() -> None:
        for index in range(launches):
            calls[index % len(calls)]()

    return cuda_graph(everything)


def time_chains(chains: Mapping[str, Callable[[], None]], launches: int, replays: int) -> dict[str, Timing]:
    """Time several graphs of `launches` launches each, replayed in turn so that all see the same clocks."""
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in chains}
    for _ in range(3):
        for replay in chains.values():
            replay()
    for _ in range(replays):
        for name, replay in chains.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            replay()
            end.record()
            spans[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: _timing([1e3 * start.elapsed_time(end) / launches for start, end in pairs], launches)
        for name, pairs in spans.items()
    }


def _timing(values: Sequence[float], launches: int) -> Timing:
    tenths = statistics.quantiles(values, n=10)
    return Timing(statistics.median(values), tenths[0], tenths[-1], launches, len(values))


def read_rate() -> float:
    """Bytes per microsecond of a pure read: the sum of 2 GiB of FP32."""
    values = torch.rand(FLOOR_BYTES // 4, device="cuda")
    total = torch.empty((), device="cuda")
    replay = chain([lambda: torch.sum(values, dim=0, out=total)], 4)
    return FLOOR_BYTES / time_chains({"read": replay}, 4, 30)["read"].median_us
