"""`bin/bench-decode`: a decode step of one rank on this GPU, in a CUDA graph, beside the same step of vLLM's kernels.

Random weights in one GPU's memory; a rank that is alone exchanges with itself (its peers' addresses are its own), and
every layer routes to as many distinct experts as asked. Method: docs/measuring.md, results: docs/benchmarks.md.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench import forced_routing, machine, packed_cache
from bench.part_times import part_of, parts
from bench.plan_pack import Packed, load_plan_kernels, read_plans
from bench.timing import Timing, read_rate, time_chains
from jitspark.checking.check import cuda_graph
from jitspark.checking.packed import Kernels
from jitspark.checking.plan_arguments import Tensors, random_step, random_weights
from jitspark.errors import JitsparkError, PackError
from jitspark.plans.binding import local_memory
from jitspark.plans.bound_plan import Operations
from jitspark.plans.costs import Workload, costs
from jitspark.plans.executor import Executor
from jitspark.plans.plan import CUTE, Launch, Plan, Stage

RESULTS = Path(__file__).resolve().parent / "results"
STOCK = "stock"
NUMBERS = {"rank": 0, "timeout_us": 2_000_000}
UNIFORM = {8: 57, 16: 102, 32: 163, 64: 222}  # distinct experts of 256 where each token chooses 8 at random


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured: rows of the step, tokens of each request, distinct experts of a layer."""

    rows: int
    context: int
    distinct: int


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's weights, which all executors share, the plans by (rows, provider, stage), and their kernels."""

    plans: Mapping[tuple[int, str, str], Packed]
    kernels: Kernels
    weights: Tensors
    generator: torch.Generator

    def plan(self, rows: int, provider: str, stage: Stage = Stage.DECODE) -> Packed:
        found = self.plans.get((rows, provider, stage.value))
        if found is None:
            raise PackError(
                where="pack",
                found=f"no {stage} plan of {provider} for {rows} rows",
                needed="one for each size that is measured",
                remedy="Make the pack with bin/make-decode-pack --m.",
            )
        return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"bench-decode: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    target = machine.own_target()
    rows = {point.rows for point in _points(options)}
    with packed_cache.cache_root(options) as root:
        plans = [each for each in read_plans(root, "bench", target) if each.about["layers"] == options.layers]
        plans = [each for each in plans if each.plan.tp == options.tp and each.plan.rows in rows]
        loading = time.perf_counter()
        kernels = load_plan_kernels(root, plans)
        loaded = time.perf_counter() - loading
    about = machine.description(options.commit)
    rate = read_rate()
    print(
        f"{about['gpu']}, torch {about['torch']}: reads {rate / 1e6:.3f} TB/s; {len(kernels)} kernels in {loaded:.3f} s"
    )
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    rank = _rank(plans, kernels, generator, options)
    head = {
        "about": about,
        "read_tb_per_s": rate / 1e6,
        "seed": options.seed,
        "tp": options.tp,
        "layers": options.layers,
    }
    path = options.out / f"{machine.file_stem('decode', about)}.json"
    points: list[dict[str, Any]] = []
    for point in _points(options):
        started = time.perf_counter()
        points.append(_measure(rank, point, rate, options))
        print(f"{_line(points[-1])} [{time.perf_counter() - started:.1f} s]", flush=True)
        write(path, head, points)  # what was measured before an interrupt or a fault is kept
    print(path)
    return 1 if any(each["problems"] for each in points) else 0


def write(path: Path, head: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"format": 1, **head, "points": points}, indent=1) + "\n")


def _points(options: argparse.Namespace) -> list[Point]:
    """Every asked combination; with `--sweep`, fewer experts, other contexts, more rows."""
    asked = [Point(*each) for each in itertools.product(options.m, options.ctx, options.distinct_experts)]
    if not options.sweep:
        return asked
    first = asked[0]
    more = [Point(first.rows, first.context, 30), *(Point(first.rows, ctx, first.distinct) for ctx in (131072, 2048))]
    more += [Point(rows, first.context, UNIFORM[rows]) for rows in (16, 32, 64)]
    more += [Point(rows, first.context, 30) for rows in (16, 32, 64)]
    return list(dict.fromkeys((*asked, *more)))


def _rank(plans: Sequence[Packed], kernels: Kernels, generator: torch.Generator, options: argparse.Namespace) -> Rank:
    started = time.perf_counter()
    positions = max(point.context for point in _points(options)) + 8
    weights: Tensors = {}
    for each in plans:  # the plans of any number of rows have the same
        if each.about["provider"] == CUTE and not weights.keys() >= _weight_names(each.plan):
            weights |= random_weights(each.plan, generator, max_positions=positions)
    torch.cuda.synchronize()
    size = sum(each.numel() * each.element_size() for each in weights.values())
    print(f"{len(weights)} weights, {size / 1e9:.2f} GB, drawn in {time.perf_counter() - started:.1f} s", flush=True)
    named = {(each.plan.rows, each.about["provider"], each.plan.stage.value): each for each in plans}
    return Rank(named, kernels, weights, generator)


def _weight_names(plan: Plan) -> set[str]:
    return {buffer.name for buffer in plan.buffers if buffer.kind == "weight"}


def _operations(provider: str) -> Operations:
    if provider == CUTE:
        return {}
    from jitspark.runtime.stock_ops import stock_operations

    return stock_operations()


def _measure(rank: Rank, point: Point, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Both providers bound to the same weights and caches, captured, and replayed in turn."""
    packed = rank.plan(point.rows, CUTE)
    requests = point.rows // packed.plan.query_length
    seq_lens = [point.context] * requests
    plan = forced_routing.forced(packed.plan)
    step = random_step(plan, seq_lens, rank.generator)
    inputs = {**step.inputs, **forced_routing.forced_logits(plan, point.distinct, rank.generator)}
    executors = {
        provider: _executor(
            rank, forced_routing.forced(rank.plan(point.rows, provider).plan), provider, inputs, step.kv_caches
        )
        for provider in options.provider
    }
    captured = {provider: _capture(executor.run) for provider, executor in executors.items()}
    timings = time_chains({name: replay for name, (replay, _) in captured.items()}, 1, options.replays)
    floor = _floor_bytes(plan, point)
    found: dict[str, Any] = {
        "point": asdict(point),
        "floor_bytes": floor,
        "floor_us": sum(floor.values()) / rate,
        "timings": {name: asdict(each) for name, each in timings.items()},
        "bind": {name: asdict(each.report) for name, each in executors.items()},
        "capture_s": {name: seconds for name, (_, seconds) in captured.items()},
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "problems": [text for name, each in executors.items() for text in problems(name, each, point.distinct)],
    }
    if options.parts:

        def timed(runs: Mapping[str, Callable[[], None]]) -> Mapping[str, Timing]:
            return time_chains({name: _capture(run)[0] for name, run in runs.items()}, 1, options.replays)

        found["parts_us"] = {name: parts(each, part_of, timed) for name, each in executors.items()}
        found["operations_us"] = parts(executors[CUTE], lambda launch: launch.operation, timed)
    del executors, captured
    torch.cuda.empty_cache()
    return found


def _floor_bytes(plan: Plan, point: Point) -> dict[str, float]:
    """What each part must read: weights, of the experts' only the active ones, and the keys and values seen."""
    found: dict[str, float] = {}
    for launch, cost in zip(plan.launches, costs(plan, Workload(point.context, point.distinct)), strict=True):
        found[part_of(launch)] = found.get(part_of(launch), 0.0) + cost.weights + cost.cache
    return found


def _executor(rank: Rank, plan: Plan, provider: str, inputs: Tensors, kv_caches: Tensors) -> Executor:
    weights = {name: rank.weights[name] for name in _weight_names(plan)}
    given = {name: tensor for name, tensor in {**inputs, **kv_caches}.items() if name in plan.buffer_named()}
    return Executor(
        plan, rank.kernels, {**weights, **given}, "cuda",
        operations=_operations(provider), numbers=NUMBERS, symmetric=local_memory(plan, "cuda"),
    )  # fmt: skip


def _capture(run: Callable[[], object]) -> tuple[Callable[[], None], float]:
    """Replays `run`, which runs once before, and the seconds that the capture took."""
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    replay = cuda_graph(lambda: run() and None)
    return replay, time.perf_counter() - started


def problems(name: str, executor: Executor, distinct: int) -> Iterator[str]:
    """What is wrong behind a run of `executor`: of vLLM's kernels only whether they ended."""
    found: list[torch.Tensor] = []

    def note(launch: Launch, arguments: Sequence[Any]) -> None:
        if forced_routing.routes(launch):
            found.append(arguments[forced_routing.index_of(launch, forced_routing.DISTINCT)].clone())

    if name != STOCK:
        executor.run(after=note)
    if any(int(each) != distinct for each in found):
        yield f"{name}: layers with {sorted({int(each) for each in found})} distinct experts"
    failure = executor.tensors.get("exchange.failure")
    if failure is not None and int(failure):
        yield f"{name}: an exchange waited in vain"
    hidden = executor.outputs["hidden"]
    if name != STOCK and not bool(hidden.isfinite().all()):
        yield f"{name}: hidden states that are not finite"


def _line(found: Mapping[str, Any]) -> str:
    point, timings = found["point"], found["timings"]
    times = ", ".join(
        f"{name} {each['median_us'] / 1e3:.3f} ms ({each['median_us'] / found['floor_us']:.2f})"
        for name, each in timings.items()
    )
    place = f"M = {point['rows']}, ctx {point['context']}, D = {point['distinct']}"
    return f"{place}: floor {found['floor_us'] / 1e3:.3f} ms; {times} {' '.join(found['problems'])}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bin/bench-decode", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int, default=62)
    parser.add_argument("--m", type=int, nargs="+", default=[8], help="rows of the step (default: 8)")
    parser.add_argument("--ctx", type=int, nargs="+", default=[32768], help="tokens of each request (default: 32768)")
    parser.add_argument("--distinct-experts", type=int, nargs="+", default=[57], help="of each layer (default: 57)")
    parser.add_argument("--sweep", action="store_true", help="also fewer experts, other contexts and more rows")
    parser.add_argument("--provider", nargs="+", choices=[CUTE, STOCK], default=[CUTE, STOCK])
    parser.add_argument("--parts", action="store_true", help="also each part's launches alone")
    machine.add_arguments(parser, RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
