"""One rank of `bin/bench-collectives`: its exchanges with other processes, checked and timed.

Prints one JSON object per case. Ranks are processes with a GPU each; for a try without as many GPUs they share one
(no timings then), or run the references on CPUs.
"""

import argparse
import contextlib
import functools
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import packed_cache
from bench.collective_baselines import baselines
from bench.collective_cases import cases, needed
from bench.rank_group import Ranks, leave
from bench.rank_world import Values, World, draw_world, launcher
from jitspark.checking.check import default_capture
from jitspark.checking.compare import compare
from jitspark.checking.guarded import bits
from jitspark.checking.packed import load_kernels
from jitspark.key import recipe_of
from jitspark.peer_memory import map_peers
from jitspark.spec import Case, Specialization
from jitspark.target import target_of_capability

RESULTS = Path(__file__).resolve().parent / "results"
ROUNDS = 4
LAUNCHES = 200  # of a timed graph: ranks begin it some 10 us apart
TIMEOUT_US = 5_000_000
ALIGN = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """Where this rank runs, and with whom."""

    group: Ranks
    device: torch.device
    replays: int
    timed: bool

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def barrier(self) -> None:
        self.synchronize()
        self.group.gather(torch.zeros(1, device=self.device))
        self.synchronize()


def place_values(world: World, place: Place) -> tuple[Values, torch.Tensor]:
    """A rank's arguments, its inboxes in memory that all ranks map."""
    values = world.values(place.group.rank, TIMEOUT_US)
    sizes = {inbox: -(-values[inbox].nbytes // ALIGN) * ALIGN for inbox in world.tables.values()}
    if place.device.type == "cpu":
        memory = torch.zeros(sum(sizes.values()), dtype=torch.uint8)
        addresses: tuple[int, ...] = (memory.data_ptr(),) * world.size
    else:
        memory, addresses = map_peers(sum(sizes.values()), place.group.process_group, place.device)
    memory.zero_()
    offset = 0
    for table, inbox in world.tables.items():
        old = values[inbox]
        values[inbox] = memory[offset : offset + old.nbytes].view(old.dtype).view(old.shape)
        values[table].copy_(torch.tensor([address + offset for address in addresses], dtype=torch.int64))
        offset += sizes[inbox]
    place.barrier()
    return values, memory


class RankOfWorld:
    """This rank of one case."""

    def __init__(self, world: World, case: Case, kernel: Callable[..., Any], place: Place) -> None:
        self.world, self.case, self.place = world, case, place
        self.values, self.memory = place_values(world, place)
        self.launch = launcher(kernel, self.values)
        self.start = {name: world.common[name].clone() for name in world.written if name in world.common}
        self.capture = default_capture(place.device)

    def round(self, number: int) -> None:
        for name, first in self.start.items():
            self.values[name].copy_(first)
        self.values[self.world.payload].copy_(self.world.rounds[number][self.place.group.rank])
        self.launch()

    def check(self) -> dict[str, Any]:
        """Rounds against the reference, the ranks against each other, and every replay against the first round."""
        problems: list[str] = []
        margin, seen = 0.0, []
        for number in range(ROUNDS):
            self.round(number)
            self.place.synchronize()
            got = {name: self.values[name].clone() for name in self.world.written}
            seen.append(got)
            want = self.world.expected(self.place.group.rank, number)
            found = [compare(name, got[name], want[name], *self.case.tolerance_of(name)) for name in got]
            margin = max(margin, *(each.margin for each in found))
            problems += [f"round {number}: {each.problem}" for each in found if each.problem]
            problems += self._unlike(got)
        problems += self._replay(seen)
        word = int(self.values["failure"])
        problems += [f"failure word {word}"] if word else []
        return {"margin": margin, "exchanges": ROUNDS * (1 + self.place.replays), "problems": problems}

    def _unlike(self, got: Values) -> list[str]:
        """Outputs that have other bits on another rank."""
        unlike = []
        for name, value in got.items():
            every = self.place.group.gather(bits(value).to(torch.int64).flatten())
            if bool((every != every[0]).any()):
                unlike.append(f"{name} differs between ranks")
        return unlike

    def _replay(self, seen: Sequence[Values]) -> list[str]:
        differing = torch.zeros((), dtype=torch.int64, device=self.place.device)

        def rounds() -> None:
            for number in range(ROUNDS):
                self.round(number)
                for name, first in seen[number].items():
                    differing.add_((bits(self.values[name]) != bits(first)).sum())

        replay = self.capture(rounds)
        differing.zero_()
        self.place.barrier()
        for index in range(self.place.replays):
            if self.place.device.type == "cuda" and (7 * index + 3 * self.place.group.rank) % 50 == 0:
                torch.cuda._sleep(20_000)  # noqa: SLF001 - ranks drift apart
            replay()
        self.place.synchronize()
        count = int(differing)
        return [f"{count} elements changed in {self.place.replays} replays"] if count else []

    def time(self, contenders: Mapping[str, Callable[[], None]], repeats: int = 20) -> dict[str, tuple[float, ...]]:
        """Microseconds per launch on the slower rank, in graphs of LAUNCHES: median, 10th and 90th percentile."""
        replays = {}
        for name, call in {"fused": self.launch, **contenders}.items():
            self.place.barrier()
            call()
            self.place.barrier()

            def chain(call: Callable[[], None] = call) -> None:
                for _ in range(LAUNCHES):
                    call()

            replays[name] = self.capture(chain)
        spans: dict[str, list[float]] = {name: [] for name in replays}
        for _ in range(repeats):
            for name, replay in replays.items():
                self.place.barrier()
                spans[name].append(self._span(replay))
        own = torch.tensor([spans[name] for name in replays], dtype=torch.float64, device=self.place.device)
        slowest = self.place.group.gather(own).amax(dim=0).tolist()
        return {name: _spread(values) for name, values in zip(replays, slowest, strict=True)}

    @staticmethod
    def _span(replay: Callable[[], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * float(start.elapsed_time(end))


def _spread(spans: Sequence[float]) -> tuple[float, ...]:
    tenths = statistics.quantiles(spans, n=10)
    return tuple(value / LAUNCHES for value in (statistics.median(spans), tenths[0], tenths[-1]))


def run(options: argparse.Namespace, place: Place) -> Iterator[dict[str, Any]]:
    work = list(cases(place.group.size, options.m, hidden_only=not options.small))
    kernels = _kernels([each for each, _ in work], options, place)
    for specialization, case in work:
        world = draw_world(specialization, case.axes, options.seed, ROUNDS, place.device)
        fewer = 1 if case.axes["num_tokens"] == options.m[0] else 10
        here = replace(place, replays=max(1, place.replays // fewer))
        rank = RankOfWorld(world, case, kernels[specialization.title()], here)
        found = {"case": f"{specialization.title()} num_tokens={case.axes['num_tokens']}", **rank.check()}
        shots = " in two shots" if specialization.statics.get("shots") == 2 else ""
        found |= {"kernel": f"{specialization.name}{shots}", "num_tokens": case.axes["num_tokens"]}
        if place.timed and not found["problems"]:
            found["us"] = rank.time(baselines(rank.world, rank.values, place.group, kernels))
        yield found


def _kernels(
    specializations: Sequence[Specialization], options: argparse.Namespace, place: Place
) -> dict[str, Callable[..., Any]]:
    """By title, those that baselines need too."""
    if place.device.type == "cpu":
        from jitspark.runtime.distributed_exchanges import exchange_over

        gather = place.group.gather
        return {
            each.title(): functools.partial(exchange_over(each.name, gather), **each.statics)
            for each in specializations
        }
    target = target_of_capability(*torch.cuda.get_device_capability(place.device))
    assert target is not None
    wanted = [*specializations, *(needed(specializations) if place.timed else ())]
    with packed_cache.cache_root(options) as root:
        loaded = load_kernels(root, wanted, target)
    return {each.title(): loaded[recipe_of(each, target).key].function for each in wanted}


def joined(options: argparse.Namespace) -> Place:
    """This process as a rank. Ranks that share a GPU, or have none, talk over gloo."""
    own_gpu = options.device == "cuda" and not options.same_gpu
    device = torch.device("cpu") if options.device == "cpu" else torch.device("cuda", options.rank if own_gpu else 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(str(options.store), options.world)
    patience = timedelta(seconds=options.patience)
    backend = "cpu:gloo,cuda:nccl" if own_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=options.rank, world_size=options.world, timeout=patience)
    group = Ranks(options.rank, options.world, dist.group.WORLD)
    return Place(group, device, options.replays, timed=own_gpu)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    place = joined(options)
    good = True
    for found in run(options, place):
        good &= not found["problems"]
        print(json.dumps(found), flush=True)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return 0 if good else 1


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.collectives_rank", description=__doc__)
    packed_cache.add_arguments(made)
    made.add_argument("--m", type=int, nargs="+", default=[8, 16, 32, 64], help="rows (default: 8 16 32 64)")
    made.add_argument("--world", type=int, default=2, help="ranks (default: 2)")
    made.add_argument("--rank", type=int, default=0)
    made.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()) / "store", help="a new file")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--same-gpu", action="store_true", help="all ranks on one GPU: checked, not timed")
    made.add_argument("--small", action="store_true", help="small sizes too")
    made.add_argument(
        "--replays",
        type=int,
        default=2500,
        help="of graphs of four exchanges with the first number of rows; a tenth with others (default: 2500)",
    )
    made.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the result goes")
    made.add_argument("--commit", default="", help="what the result says it was measured at")
    made.add_argument("--patience", type=float, default=60.0, help="seconds to wait for another rank (default: 60)")
    made.add_argument("--seed", type=int, default=20260, help="of the payloads")
    return made


if __name__ == "__main__":
    leave(main())
