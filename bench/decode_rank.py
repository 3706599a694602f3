"""One rank of bin/bench-decode-ranks: binds, captures, checks and times a step together with the others.

Rank 0 prints and writes the result; every rank tells of its own problems.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import decode, expert_parallel, forced_routing, machine, nccl_exchanges
from bench.busiest_rank import busiest_experts, busiest_first, floor_bytes
from bench.check_ranks import SHARED_OUT
from bench.collectives_rank import Place
from bench.decode import Point
from bench.expert_parallel import PURPOSE, SLICES, WHOLE
from bench.part_times import part_of, parts
from bench.plan_pack import Packed, load_plan_kernels, read_plans
from bench.rank_group import Ranks
from bench.rank_timing import time_together, unlike_over_replays
from bench.timing import Timing, read_rate
from jitspark.checking.check import cuda_graph
from jitspark.checking.packed import Kernels, load_kernels
from jitspark.checking.plan_arguments import Tensors, random_step, random_weights
from jitspark.peer_memory import map_peers
from jitspark.plans.binding import SymmetricMemory, local_memory
from jitspark.plans.costs import Workload, costs
from jitspark.plans.executor import Executor
from jitspark.plans.plan import CUTE, Kind, Launch, Plan, TensorArgument
from jitspark.plans.reference_executor import argument_names

ALONE = "cute alone"  # our step with exchanges whose peers are this rank itself
NCCL, STOCK = nccl_exchanges.NCCL, nccl_exchanges.STOCK
TIMEOUT_US = 20_000_000
EXCHANGE = "all_reduce"  # the part of a plan
EXCHANGES = "exchanges"  # all of its launches, those that finish experts' rows included
SPARE_BYTES = 3e9  # of graphs, libraries and work space


@dataclass(frozen=True, slots=True)
class Loaded:
    """The pack's plans by (experts, rows, provider), and kernels: by key, and by title those that follow NCCL."""

    plans: Mapping[tuple[str, int, str], Packed]
    kernels: Kernels
    unfused: Mapping[str, Callable[..., Any]]
    seconds: float

    @staticmethod
    def read(root: Path, options: argparse.Namespace) -> "Loaded":
        """Plans and kernels of the sizes asked for; `seconds` that their reading and loading took."""
        target = machine.own_target()
        started = time.perf_counter()
        found = [each for each in read_plans(root, PURPOSE, target) if each.plan.rows in options.m]
        kernels = load_plan_kernels(root, found)
        seconds = time.perf_counter() - started
        following = [each for packed in found for each in nccl_exchanges.all_unfused(packed.plan)]
        named = {each.title(): each for each in following}
        loaded = load_kernels(root, list(named.values()), target)
        unfused = {title: kernel.function for title, kernel in zip(named, loaded.values(), strict=True)}
        plans = {(each.about["experts"], each.plan.rows, each.about["provider"]): each for each in found}
        return Loaded(plans, kernels, unfused, seconds)


class Alone(Ranks):
    """One rank of a group whose others are not there: every peer's memory is its own, and nobody is waited for."""

    __slots__ = ()

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        return own[None]


def alone(options: argparse.Namespace) -> Place:
    """The only process, as the first of `world` ranks."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return Place(Alone(0, options.world, None), device, options.replays, timed=True)


class Rank:
    """This rank with its share of the weights for one way of dealing out experts."""

    def __init__(self, loaded: Loaded, experts: str, place: Place, options: argparse.Namespace) -> None:
        self.loaded, self.experts, self.place, self.options = loaded, experts, place, options
        self.size, self.rank, self.alone = place.group.size, place.group.rank, isinstance(place.group, Alone)
        ours = [each.plan for (how, _, provider), each in loaded.plans.items() if (how, provider) == (experts, CUTE)]
        self.weights = self._draw(ours)
        self.memory: SymmetricMemory | None = None
        if not self.alone:
            most = max(plan.symmetric_bytes for plan in ours)
            self.memory = SymmetricMemory(*map_peers(most, place.group.process_group, place.device))

    def _draw(self, plans: Sequence[Plan]) -> Tensors:
        """Shares that are this rank's alone, and whole weights as rank 0 has them, for any number of rows."""
        generator = torch.Generator(device=self.place.device).manual_seed(self.options.seed + self.rank)
        positions = max(self.options.ctx) + 8
        weights = random_weights(plans[0], generator, max_positions=positions)
        shares = shared_out(plans[0])
        for name, weight in weights.items():
            if name not in shares and not self.alone:
                dist.broadcast(weight, 0, group=self.place.group.process_group)
        self.place.synchronize()
        return weights

    def fits(self, point: Point) -> bool:
        """Whether the keys and values of the point's requests fit beside the weights, on every rank."""
        plan = self._plan(point.rows, CUTE)
        needed = SPARE_BYTES + sum(each.cache for each in costs(plan, Workload(point.context, point.distinct)))
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        return self._slowest(needed - free) <= 0

    def measure(self, point: Point, rate: float, *, details: bool) -> dict[str, Any]:
        """Everything that is asked of one point; `details` are the parts' times and the bits over many replays."""
        generator = torch.Generator(device=self.place.device).manual_seed(self.options.seed)
        ours = forced_routing.forced(self._plan(point.rows, CUTE))
        step = random_step(ours, [point.context] * (point.rows // ours.query_length), generator)
        logits = forced_routing.forced_logits(ours, point.distinct, generator)
        if self.alone and self.experts == WHOLE:
            logits = busiest_first(logits, self.size)
        inputs = {**step.inputs, **logits, **step.kv_caches}
        executors = {name: self._bound(name, point.rows, inputs) for name in self._variants()}
        captured = {name: self._capture(executor.run) for name, executor in executors.items()}
        busiest = busiest_experts(logits, self.size) if self.experts == WHOLE else {}
        floor = floor_bytes(ours, point, busiest)
        problems = [text for name, each in executors.items() for text in self._wrong(name, each, point.distinct)]
        found: dict[str, Any] = {
            "point": asdict(point),
            "experts": self.experts,
            "floor_bytes": floor,
            "floor_us": sum(floor.values()) / rate,
            "busiest_experts": sum(busiest.values()) / len(busiest) if busiest else None,
        }
        if details and not self.alone:
            found["equal_replays"] = self.options.equal_replays
            problems += self._unlike(executors[CUTE], captured[CUTE][0], generator)
        replays = {name: replay for name, (replay, _) in captured.items()}
        found["timings"] = _plain(time_together(replays, self.place, self.options.replays))
        if details:
            found["parts_us"] = {name: self._parts(name, each) for name, each in executors.items()}
        found["bind_s"] = {name: self._slowest(each.report.seconds) for name, each in executors.items()}
        found["capture_s"] = {name: self._slowest(seconds) for name, (_, seconds) in captured.items()}
        found["peak_bytes"] = int(self._slowest(torch.cuda.max_memory_allocated()))
        found["problems"] = self._all_problems(problems)
        return found

    def release(self) -> None:
        """Give the weights' memory back, whoever still holds the tensors: vLLM's operations were seen to."""
        self.place.synchronize()
        for weight in self.weights.values():
            weight.untyped_storage().resize_(0)

    def _variants(self) -> list[str]:
        """What this way of dealing out experts is measured with; NCCL in our step, with slices alone."""
        if self.alone:
            return [ALONE, *(each for each in (STOCK,) if each in self.options.provider)]
        asked = [CUTE, ALONE, *(each for each in (NCCL, STOCK) if each in self.options.provider)]
        return [each for each in asked if each != NCCL or self.experts == SLICES]

    def _plan(self, rows: int, provider: str) -> Plan:
        return self.loaded.plans[self.experts, rows, provider].plan

    def _bound(self, name: str, rows: int, inputs: Tensors) -> Executor:
        plan = forced_routing.forced(self._plan(rows, CUTE if name == ALONE else name))
        known = plan.buffer_named()
        weights = {each: self.weights[each] for each, buffer in known.items() if buffer.kind is Kind.WEIGHT}
        given = {each: tensor for each, tensor in inputs.items() if each in known}
        memory = local_memory(plan, self.place.device)
        if name == CUTE and self.memory is not None:
            self.place.barrier()  # no other rank's earlier step still writes here
            memory = self.memory
            memory.local.zero_()
            self.place.barrier()
        total = self._num_experts(plan)
        first = expert_parallel.first_expert(total, self.rank, self.size)
        numbers = {"rank": self.rank, "timeout_us": TIMEOUT_US, expert_parallel.FIRST_EXPERT: first}
        return Executor(
            plan, self.loaded.kernels, {**weights, **given}, self.place.device,
            operations=self._operations(name, total, first), numbers=numbers, symmetric=memory,
        )  # fmt: skip

    def _operations(self, name: str, total: int, first: int) -> nccl_exchanges.Operations:
        if name == NCCL:
            return nccl_exchanges.nccl_operations(self.place.group, self.loaded.unfused)
        if name == STOCK:
            expert_map = None
            if self.experts == WHOLE:
                local = total // self.size
                expert_map = torch.full((total,), -1, dtype=torch.int32, device=self.place.device)
                expert_map[first : first + local] = torch.arange(local, dtype=torch.int32)
            group = None if self.alone else self.place.group
            return {**expert_parallel.OPERATIONS, **nccl_exchanges.stock_exchanging(group, expert_map)}
        return dict(expert_parallel.OPERATIONS)

    @staticmethod
    def _num_experts(plan: Plan) -> int:
        return int(plan.buffer_named()["expert_ids"].shape[0])

    def _capture(self, run: Callable[[], object]) -> tuple[Callable[[], None], float]:
        """Replays `run`, which runs once before, and the seconds that the capture took."""
        self.place.barrier()
        run()
        self.place.barrier()
        started = time.perf_counter()
        replay = cuda_graph(lambda: run() and None)
        return replay, time.perf_counter() - started

    def _unlike(self, executor: Executor, replay: Callable[[], None], generator: torch.Generator) -> list[str]:
        embeddings = executor.tensors["inputs_embeds"]

        def change() -> None:
            embeddings.normal_(generator=generator)

        self.place.barrier()
        return unlike_over_replays(replay, executor.outputs, change, self.place, self.options.equal_replays)

    def _parts(self, name: str, executor: Executor) -> dict[str, float]:
        """Of our step also all exchanges together; vLLM's experts are multiplied where their rows are exchanged."""

        def timed(runs: Mapping[str, Callable[[], None]]) -> Mapping[str, Timing]:
            chains = {name: self._capture(run)[0] for name, run in runs.items()}
            return time_together(chains, self.place, self.options.replays)

        return parts(executor, part_of if name == STOCK else group_of, timed)

    def _wrong(self, name: str, executor: Executor, distinct: int) -> Iterator[str]:
        self.place.barrier()
        yield from decode.problems(name, executor, distinct)

    def _slowest(self, value: float) -> float:
        """The largest of all ranks'."""
        own = torch.tensor([float(value)], dtype=torch.float64, device=self.place.device)
        return float(self.place.group.gather(own).max())

    def _all_problems(self, own: Sequence[str]) -> list[str]:
        """This rank's, and how many others have; each rank prints its own."""
        for text in own:
            print(f"rank {self.rank}: {text}", file=sys.stderr, flush=True)
        counts = self.place.group.gather(torch.tensor([len(own)], device=self.place.device)).flatten().tolist()
        others = [f"rank {rank}: {count} problems" for rank, count in enumerate(counts) if count and rank != self.rank]
        return [*own, *others]


def shared_out(plan: Plan) -> set[str]:
    """Weights of which each rank has a share of its own."""
    return {
        argument.buffer
        for launch in plan.launches
        if launch.operation in SHARED_OUT
        for argument, name in zip(launch.arguments, argument_names(launch), strict=True)
        if isinstance(argument, TensorArgument) and name in ("weight", "weight_scales", "pooler")
    }


def group_of(launch: Launch) -> str:
    return EXCHANGES if launch.part == EXCHANGE else launch.part


def _plain(timings: Mapping[str, Timing]) -> dict[str, Any]:
    return {name: asdict(each) for name, each in timings.items()}


def head(loaded: Loaded, place: Place, options: argparse.Namespace) -> dict[str, Any]:
    """What a result says of all its points. Collective."""
    rate = torch.tensor([read_rate(), loaded.seconds], dtype=torch.float64, device=place.device)
    every = place.group.gather(rate)
    some = next(iter(loaded.plans.values()))
    return {
        "about": machine.description(options.commit),
        "read_tb_per_s": float(every[:, 0].min()) / 1e6,
        "seed": options.seed,
        "tp": place.group.size,
        "alone": isinstance(place.group, Alone),
        "geometry": some.about["geometry"],
        "layers": some.about["layers"],
        "plans": len(loaded.plans),
        "kernels": len(loaded.kernels),
        "load_s": [round(each, 4) for each in every[:, 1].tolist()],
    }
