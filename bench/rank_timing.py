"""Times of graphs that all ranks replay together, and whether what comes out has the same bits everywhere."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch

from bench.collectives_rank import Place
from bench.timing import Timing
from jitspark.checking.guarded import bits

Replay = Callable[[], None]

SPAN_US = 8000.0  # of replays in a row: ranks begin it some 20 us apart
MOST_STEPS = 200
BLOCK = 50  # replays between which an input changes
DRIFT = 50  # of so many replays a rank begins one late
DRIFT_CYCLES = 20_000  # some 10 us


def time_together(replays: Mapping[str, Replay], place: Place, repeats: int) -> dict[str, Timing]:
    """Microseconds per step on the slowest rank: of spans of steps that all ranks begin together, `repeats` times.

    A span lasts about SPAN_US. Graphs take turns, so that all see the same clocks.
    """
    steps = {name: _steps(replay, place) for name, replay in replays.items()}
    spans: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(repeats):
        for name, replay in replays.items():
            place.barrier()
            spans[name].append(_span(replay, steps[name]))
    own = torch.tensor(list(spans.values()), dtype=torch.float64, device=place.device)
    slowest = place.group.gather(own).amax(dim=0).tolist()
    return {name: _timing(values, steps[name]) for name, values in zip(spans, slowest, strict=True)}


def _steps(replay: Replay, place: Place) -> int:
    """How many replays make a span, the same on every rank; the first ones warm up."""
    place.barrier()
    _span(replay, 2)
    place.barrier()
    own = torch.tensor([_span(replay, 2)], dtype=torch.float64, device=place.device)
    return steps_of(float(place.group.gather(own).max()))


def steps_of(us: float) -> int:
    return max(1, min(MOST_STEPS, round(SPAN_US / us)))


def _span(replay: Replay, steps: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(steps):
        replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / steps


def _timing(values: Sequence[float], steps: int) -> Timing:
    tenths = statistics.quantiles(values, n=10)
    return Timing(statistics.median(values), tenths[0], tenths[-1], steps, len(values))


class Digest:
    """A number for each of some tensors: their bits, each times an odd number, summed up modulo 2**64.

    A single bit that differs always shows. The odd numbers are the same on every rank.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        generator = torch.Generator(device=tensors[0].device).manual_seed(7)
        self._tensors = tensors
        self._factors = [
            2 * torch.randint(1, 2**61, (each.numel(),), generator=generator, device=each.device) + 1
            for each in tensors
        ]

    def __call__(self) -> torch.Tensor:
        """int64 [tensors]."""
        pairs = zip(self._tensors, self._factors, strict=True)
        return torch.stack([(bits(each).flatten().to(torch.int64) * factors).sum() for each, factors in pairs])


def unlike_over_replays(
    replay: Replay, outputs: Mapping[str, torch.Tensor], change: Callable[[], None], place: Place, replays: int
) -> list[str]:
    """What of `outputs` has other bits on another rank, or from replay to replay of the same inputs.

    `change` changes the inputs, alike on all ranks, before each block of replays; ranks drift apart meanwhile.
    """
    digest = Digest(list(outputs.values()))
    found = torch.empty((replays, len(outputs)), dtype=torch.int64, device=place.device)
    for number in range(replays):
        if number % BLOCK == 0:
            change()
        if place.device.type == "cuda" and (7 * number + 3 * place.group.rank) % DRIFT == 0:
            torch.cuda._sleep(DRIFT_CYCLES)  # noqa: SLF001 - ranks drift apart
        replay()
        found[number] = digest()
    place.synchronize()
    return differences(list(outputs), place.group.gather(found))


def differences(names: Sequence[str], digests: torch.Tensor) -> list[str]:
    """Of `digests` [ranks, replays, outputs]: which outputs differ between ranks, or within a block of replays."""
    problems = []
    for index, name in enumerate(names):
        every = digests[:, :, index]
        apart = int((every != every[0]).any(dim=0).sum())
        if apart:
            problems.append(f"{name} differs between ranks in {apart} of {every.shape[1]} replays")
        blocks = every.split(BLOCK, dim=1)
        changed = sum(int((each != each[:, :1]).sum()) for each in blocks)
        if changed:
            problems.append(f"{name} changed in {changed} replays of the same inputs")
        if len(blocks) > 1 and len({int(each[0, 0]) for each in blocks}) == 1:
            problems.append(f"{name} is the same for all inputs")
    return problems
