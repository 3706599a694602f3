"""`python -m bench.check_exchanges`: a world of ranks on this one GPU, with each exchange kernel as they would run it.

Each rank has a stream and memory of its own. Checked against the references: the first rounds; that all ranks have the
same bits; that thousands of replays of CUDA graphs change none of them, with the ranks at different speeds; that a rank
which never comes is named within its time, and only waited for once. Exit status 0 when all of it holds.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench import machine, packed_cache
from bench.collective_cases import CHECKED
from bench.rank_world import Values, World, draw_world, launcher, wire_simulated
from jitspark.checking.check import cuda_graph
from jitspark.checking.compare import compare
from jitspark.checking.guarded import bits
from jitspark.checking.packed import Kernels, load_kernels
from jitspark.errors import JitsparkError
from jitspark.key import recipe_of
from jitspark.registry import load_spec
from jitspark.spec import Case

ROUNDS = 4  # payloads that go round: one from the wrong round shows
TIMEOUT_US = 5_000_000
SILENCE_US = 100_000
MOST_CLUSTERS = 32  # of 8 CTAs of 128 threads with 168 registers: an H200 has places for 42 at least


@dataclass(frozen=True, slots=True)
class Found:
    """What one case of one kernel showed. `margin` is the largest error over what is allowed."""

    title: str
    margin: float
    exchanges: int
    problems: tuple[str, ...]


class SimulatedWorld:
    """All ranks of one case, ready to launch."""

    def __init__(self, world: World, kernel: Callable[..., Any], timeout_us: int) -> None:
        self.world = world
        self.every = [world.values(rank, timeout_us) for rank in range(world.size)]
        wire_simulated(world, self.every)
        self.launches = [launcher(kernel, values) for values in self.every]
        self.streams = [torch.cuda.Stream() for _ in self.every]
        self.start = {name: world.common[name].clone() for name in world.written if name in world.common}

    def round(self, rank: int, number: int) -> None:
        """Set a rank's inputs for this round, and launch, on the current stream."""
        values = self.every[rank]
        for name, first in self.start.items():
            values[name].copy_(first)
        values[self.world.payload].copy_(self.world.rounds[number][rank])
        self.launches[rank]()

    def on_all_streams(self, work: Callable[[int], None], ranks: Sequence[int] | None = None) -> None:
        for rank in range(self.world.size) if ranks is None else ranks:
            with torch.cuda.stream(self.streams[rank]):
                work(rank)

    def written(self, rank: int) -> Values:
        return {name: self.every[rank][name].clone() for name in self.world.written}

    def failures(self) -> list[int]:
        return [int(values["failure"]) for values in self.every]


def check(world: World, case: Case, kernel: Callable[..., Any], replays: int) -> Found:
    simulated = SimulatedWorld(world, kernel, TIMEOUT_US)
    problems: list[str] = []
    margin = 0.0
    seen = []
    for number in range(ROUNDS):
        torch.cuda.synchronize()
        simulated.on_all_streams(lambda rank, number=number: simulated.round(rank, number))
        torch.cuda.synchronize()
        got = [simulated.written(rank) for rank in range(world.size)]
        seen.append(got[0])
        found = [
            compare(f"rank {rank}, {name}", value, world.expected(rank, number)[name], *case.tolerance_of(name))
            for rank in (0, world.size - 1)
            for name, value in got[rank].items()
        ]
        margin = max(margin, *(each.margin for each in found))
        problems += [f"round {number}: {each.problem}" for each in found if each.problem]
        problems += [
            f"round {number}: {name} differs between ranks 0 and {rank}"
            for rank in range(1, world.size)
            for name in got[0]
            if not torch.equal(bits(got[0][name]), bits(got[rank][name]))
        ]
    problems += [f"failure words {simulated.failures()}"] if any(simulated.failures()) else []
    if not problems:
        problems += replay(simulated, seen, replays)
    title = f"{world.specialization.title()} num_tokens={world.axes['num_tokens']}"
    return Found(title, margin, ROUNDS * (replays + 1), tuple(problems))


def replay(simulated: SimulatedWorld, seen: Sequence[Values], replays: int) -> list[str]:
    """Graphs of ROUNDS exchanges each, one per rank, replayed side by side; differences are counted on the GPU."""
    differing = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in simulated.every]

    def rounds(rank: int) -> None:
        for number in range(ROUNDS):
            simulated.round(rank, number)
            for name, first in seen[number].items():
                differing[rank] += (bits(simulated.every[rank][name]) != bits(first)).sum()

    graphs = []
    # Capturing alone: the launches inside are not run.
    for rank in range(simulated.world.size):
        graphs.append(cuda_graph(lambda rank=rank: rounds(rank)))
        differing[rank].zero_()
    torch.cuda.synchronize()
    for index in range(replays):
        for rank, graph in enumerate(graphs):
            with torch.cuda.stream(simulated.streams[rank]):
                if (index * 7 + rank * 3) % 50 == 0:
                    torch.cuda._sleep(20_000)  # noqa: SLF001 - ranks drift apart, now this one behind, now that one
                graph()
    torch.cuda.synchronize()
    counts = [int(each) for each in differing]
    problems = [f"elements that changed in {replays} replays, by rank: {counts}"] if any(counts) else []
    return problems + ([f"failure words {simulated.failures()}"] if any(simulated.failures()) else [])


def check_silent_rank(world: World, kernel: Callable[..., Any]) -> Found:
    """One rank never launches: the others end in time, say who it was, and do not wait again."""
    simulated = SimulatedWorld(world, kernel, SILENCE_US)
    silent = 1  # which owns a token in every world: who has nothing to wait for is told nothing
    others = [rank for rank in range(world.size) if rank != silent]
    torch.cuda.synchronize()
    seconds = []
    for _ in range(2):
        begun = time.perf_counter()
        simulated.on_all_streams(lambda rank: simulated.round(rank, 0), others)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    words = simulated.failures()
    problems = []
    if any(words[rank] != silent + 1 for rank in others):
        problems.append(f"failure words {words}, where rank {silent} was silent")
    if not SILENCE_US / 1e6 <= seconds[0] < 5 * SILENCE_US / 1e6:
        problems.append(f"waited {seconds[0]:.3f} s of {SILENCE_US / 1e6} s")
    if seconds[1] > SILENCE_US / 2e6:
        problems.append(f"waited again, {seconds[1]:.3f} s")
    text = f"silent rank: {world.specialization.title()}: {seconds[0] * 1e3:.1f} ms, then {seconds[1] * 1e3:.2f} ms"
    return Found(text, 0.0, 2, tuple(problems))


def simulated_axes(case: Case) -> dict[str, int]:
    """As many rows as fit the GPU with all ranks at once, whatever registers the kernels take."""
    size = case.axes["world_size"]
    rows = min(case.axes["num_tokens"], MOST_CLUSTERS // size)
    owned = {"num_owned": -(-rows // size)} if "num_owned" in case.axes else {}
    return {**case.axes, "num_tokens": rows, **owned}


def chosen_cases(names: Sequence[str], size: int) -> Iterator[tuple[str, Case]]:
    """One case of each way of computing, of a world of this size, with few rows."""
    for name in names:
        spec = load_spec(name)
        seen = set()
        for case in spec.cases:
            sort = spec.specialize_case(case).title()
            few = case.axes["num_tokens"] <= 8 or case.statics.get("shots") == 2  # whose rows `simulated_axes` lessens
            fits = case.axes["world_size"] == size and few and case.axes.get("num_chunks", 1) < 9
            if fits and sort not in seen and case.axes["num_tokens"] > 1:
                seen.add(sort)
                yield name, case


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"check-exchanges: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    target = machine.own_target()
    work = [(load_spec(name), case) for size in options.world for name, case in chosen_cases(CHECKED, size)]
    specializations = [spec.specialize_case(case) for spec, case in work]
    with packed_cache.cache_root(options) as root:
        kernels: Kernels = load_kernels(root, specializations, target)
    good = True
    silent_of = set()
    for specialization, (spec, case) in zip(specializations, work, strict=True):
        kernel = kernels[recipe_of(specialization, target).key].function
        world = draw_world(specialization, simulated_axes(case), options.seed, ROUNDS, "cuda")
        begun = time.perf_counter()
        results = [check(world, case, kernel, options.replays)]
        sort = (spec.name, world.size, case.statics.get("shots"))
        if sort not in silent_of:
            silent_of.add(sort)
            results.append(check_silent_rank(world, kernel))
        for found in results:
            good &= not found.problems
            said = "pass" if not found.problems else "FAIL"
            print(
                f"{said}  {found.title}  {found.exchanges} exchanges, margin {found.margin:.3f}, "
                f"{time.perf_counter() - begun:.1f} s",
                flush=True,
            )
            for problem in found.problems:
                print(f"      {problem}", flush=True)
    print("all passed" if good else "NOT all passed")
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.check_exchanges", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 8], help="ranks (default: 2 8)")
    parser.add_argument("--replays", type=int, default=2500, help="replays of graphs of four exchanges (default: 2500)")
    parser.add_argument("--seed", type=int, default=20260, help="of the payloads")
    return parser


if __name__ == "__main__":
    sys.exit(main())
