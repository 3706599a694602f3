"""`bin/bench-draft`: a draft step of one rank on this GPU, part by part and whole, beside vLLM's own kernels.

Context rows (fc, norms, K/V, store), the forward over the query rows, and the sampling loop, each captured in a CUDA
graph; then all three in one. A rank that is alone exchanges with itself. With --check, each plan is held against its
references first, launch by launch, and a replay against an eager run. Method:
docs/measuring.md, results: docs/benchmarks.md.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import draft_checks, draft_scene, machine, packed_cache
from bench.draft_checks import Call
from bench.markov import restated_sampler, stock_loop, vllm_sampler
from bench.plan_pack import Packed, load_plan_kernels, read_plans
from bench.timing import chain, read_rate, time_chains
from jitspark.checking.check import cuda_graph
from jitspark.checking.packed import Kernels
from jitspark.checking.plan_arguments import random_weights
from jitspark.errors import JitsparkError
from jitspark.plans.binding import local_memory
from jitspark.plans.costs import Workload, costs
from jitspark.plans.executor import Executor
from jitspark.plans.markov import FIRST_TOKEN
from jitspark.plans.plan import CUTE, Kind, Plan, Stage

RESULTS = Path(__file__).resolve().parent / "results"
STOCK = "stock"
NUMBERS = {"rank": 0, "timeout_us": 2_000_000, FIRST_TOKEN: 0}
COPIES = 3  # of the context chain's weights, and of the loop's, in one graph, so that the L2 cache holds none


@dataclass(frozen=True, slots=True)
class Rank:
    """Plans by (requests, stage, provider), their kernels, and the weights that all of them share."""

    plans: Mapping[tuple[int, Stage, str], Packed]
    kernels: Kernels
    weights: dict[str, torch.Tensor]
    generator: torch.Generator

    def plan(self, requests: int, stage: Stage, provider: str = CUTE) -> Plan:
        return self.plans[requests, stage, provider].plan

    def executor(self, plan: Plan, tensors: Mapping[str, torch.Tensor], operations: Any = None) -> Executor:
        needed = {buffer.name for buffer in plan.buffers if buffer.kind == Kind.WEIGHT}
        bound = {**{name: self.weights[name] for name in needed}, **tensors}
        return Executor(
            plan, self.kernels, {name: each for name, each in bound.items() if name in plan.buffer_named()}, "cuda",
            operations=operations, numbers=NUMBERS, symmetric=local_memory(plan, "cuda"),
        )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"bench-draft: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    target = machine.own_target()
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    about = machine.description(options.commit)
    found: dict[str, Any] = {"format": 1, "about": about, "seed": options.seed, "tp": options.tp}
    with packed_cache.cache_root(options) as root:
        checked = read_plans(root, "check", target) if options.check else []
        plans = [each for each in read_plans(root, "bench", target) if each.plan.tp == options.tp]
        kernels = load_plan_kernels(root, [*checked, *plans])
    path = options.out / f"{machine.file_stem('draft', about)}.json"
    try:
        found["checks"] = list(draft_checks.checks(checked, kernels, NUMBERS, generator))
        found["read_tb_per_s"] = read_rate() / 1e6
        found["runs"] = []
        rank = _rank(plans, kernels, generator, options)
        for requests in options.requests:
            found["runs"].append(_measure(rank, requests, found["read_tb_per_s"] * 1e6, options))
            print(_line(found["runs"][-1]), flush=True)
    finally:  # what was measured before an interrupt or a fault is kept
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(path)
    return 1 if any(each["problems"] for each in found["checks"]) else 0


def _rank(plans: Sequence[Packed], kernels: Kernels, generator: torch.Generator, options: argparse.Namespace) -> Rank:
    weights: dict[str, torch.Tensor] = {}
    for packed in plans:  # the plans of any number of rows have the same
        if packed.about["provider"] == CUTE and packed.about["requests"] == options.requests[0]:
            weights |= _drawn(packed.plan, generator, options.ctx + 8)
    named = {(int(each.about["requests"]), each.plan.stage, str(each.about["provider"])): each for each in plans}
    return Rank(named, kernels, weights, generator)


def _drawn(plan: Plan, generator: torch.Generator, max_positions: int) -> dict[str, torch.Tensor]:
    if plan.stage != Stage.MARKOV:
        return random_weights(plan, generator, max_positions=max_positions)
    made = {}
    for buffer in plan.buffers:
        if buffer.kind == Kind.WEIGHT:
            rows, width = (int(size) for size in buffer.shape)
            weight = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
            made[buffer.name] = weight.normal_(0, width**-0.5, generator=generator)
    return made


def _measure(rank: Rank, requests: int, rate: float, options: argparse.Namespace) -> dict[str, Any]:
    """Each part, and the whole step, ours and vLLM's in turn."""
    context, forward = rank.plan(requests, Stage.DRAFT_CONTEXT), rank.plan(requests, Stage.DRAFT)
    sampling = rank.plan(requests, Stage.MARKOV)
    words = int(sampling.buffer_named()["exchange"].shape[0])
    rows = int(sampling.buffer_named()["markov_w2"].shape[0])
    made = draft_scene.step_inputs(context, forward, options.ctx, rank.generator, words, rows)
    ours = _ours(rank, (context, forward, sampling), made)
    theirs = _theirs(rank, requests, made) if options.stock else {}
    apart = draft_checks.apart(ours, theirs, made, (context, forward)) if theirs else {}
    graphs = {f"{part}_{who}": calls for who, parts in (("us", ours), (STOCK, theirs)) for part, calls in parts.items()}
    timings = {name: _timed(name, calls, options.replays) for name, calls in graphs.items()}
    floors = _floors(context, forward, sampling, options.ctx)
    return {
        "requests": requests,
        "context": options.ctx,
        "floor_bytes": floors,
        "floor_us": {name: size / rate for name, size in floors.items()},
        "launches": {plan.stage.value: len(plan.launches) for plan in (context, forward, sampling)},
        "timings": timings,
        "apart": apart,
        "stock_sampler": "vllm" if vllm_sampler() else "restated",
        "stuck": made.sampling.stuck(),
    }


def _ours(rank: Rank, plans: tuple[Plan, Plan, Plan], made: draft_scene.StepInputs) -> dict[str, list[Call]]:
    """Calls by part, which go round in one graph; `step` is all three."""
    context, forward, sampling = plans
    stored = {**made.context.inputs, **made.context.kv_caches}
    cold = [
        rank.executor(context, {**stored, **{name: each.clone() for name, each in _own_weights(rank, context).items()}})
        for _ in range(COPIES)
    ]
    run = rank.executor(forward, {**made.forward.inputs, **made.forward.kv_caches})
    drawn = {**draft_scene.sampling_tensors(made.sampling), "hidden": run.outputs["hidden"]}
    head = rank.weights["markov_w2"]
    samplers = [rank.executor(sampling, {**drawn, "markov_w2": head.clone()}) for _ in range(COPIES)]
    sampler = samplers[0]
    whole = [cold[0].run, run.run, sampler.run]
    return {
        "context": [each.run for each in cold],
        "forward": [run.run],
        "sampling": [sampler.run],
        "loop": [partial(_behind_logits, each) for each in samplers],
        "step": [lambda: [call() for call in whole]],
    }


def _behind_logits(sampler: Executor) -> None:
    """The loop without the base logits, and what several ranks do behind it."""
    for launch in sampler.plan.launches:
        if launch.name != "base_logits":
            sampler.launch(launch)


def _own_weights(rank: Rank, plan: Plan) -> dict[str, torch.Tensor]:
    return {
        buffer.name: rank.weights[buffer.name]
        for buffer in plan.buffers
        if buffer.kind == Kind.WEIGHT and "cos_sin" not in buffer.name
    }


def _theirs(rank: Rank, requests: int, made: draft_scene.StepInputs) -> dict[str, list[Call]]:
    """With vLLM's kernels: fc whole on every rank, the loop over the whole vocabulary."""
    from bench.draft_stock import draft_operations

    context, forward = (rank.plan(requests, stage, STOCK) for stage in (Stage.DRAFT_CONTEXT, Stage.DRAFT))
    # a rank alone gathers its own share from every rank: whole, fc is that share again and again
    share = rank.weights["fc"]
    whole_fc = share.repeat(made.forward.inputs["inputs_embeds"].shape[1] // len(share), 1)
    stored = {**made.context.inputs, **made.context.kv_caches}
    combined = rank.executor(context, stored, draft_operations(whole_fc))
    run = rank.executor(forward, {**made.forward.inputs, **made.forward.kv_caches}, draft_operations())
    loop = stock_loop(requests, rank.generator, vllm_sampler() or restated_sampler)
    head, shard = rank.weights["lm_head"], made.sampling.vocab_rows
    logits = torch.empty(7 * requests, made.sampling.draft_logits.shape[-1], dtype=torch.bfloat16, device="cuda")

    def sample() -> None:
        own = torch.mm(run.outputs["hidden"], head.t())
        logits.view(7 * requests, -1, shard).copy_(own[:, None])  # what a rank alone can do of the gather
        loop()

    whole: list[Call] = [combined.run, run.run, sample]
    return {
        "context": [combined.run],
        "forward": [run.run],
        "sampling": [sample],
        "loop": [loop],
        "step": [lambda: [call() for call in whole]],
    }


def _timed(name: str, calls: Sequence[Call], replays: int) -> dict[str, Any]:
    """Microseconds of one call."""
    replay = chain(calls, len(calls)) if len(calls) > 1 else _captured(calls[0])
    return asdict(time_chains({name: replay}, len(calls), replays)[name])


def _captured(call: Call) -> Callable[[], None]:
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    return cuda_graph(lambda: call() and None)


def _floors(context: Plan, forward: Plan, sampling: Plan, seq_len: int) -> dict[str, float]:
    """Bytes that each part must read: weights, and keys and values; activations, a hundredth of this, are left out.

    The sampling loop's own weight counts in each of its steps, as stock reads it, and once in `step_read_once`.
    """
    buffers = sampling.buffer_named()
    weights = {
        name: 2.0 * int(buffers[name].shape[0]) * int(buffers[name].shape[1]) for name in ("lm_head", "markov_w2")
    }
    work = Workload(context=seq_len)
    parts = {
        "context": sum(each.weights for each in costs(context, work)),
        "forward": sum(each.weights + each.cache for each in costs(forward, work)),
        "sampling": weights["lm_head"] + sampling.query_length * weights["markov_w2"],
    }
    loop = sampling.query_length * weights["markov_w2"]
    once = sum(parts.values()) - (sampling.query_length - 1) * weights["markov_w2"]
    return {**parts, "loop": loop, "step": sum(parts.values()), "step_read_once": once}


def _line(run: Mapping[str, Any]) -> str:
    timings, floors = run["timings"], run["floor_us"]
    shown = [f"R = {run['requests']}"]
    for name, timing in timings.items():
        part = name.split("_")[0]
        ratio = f" ({timing['median_us'] / floors[part]:.2f} of floor)" if part in floors and "_us" in name else ""
        shown.append(f"{name} {timing['median_us']:.1f}{ratio}")
    return "; ".join(shown)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bin/bench-draft", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--tp", type=int, default=8, help="a rank's share of the weights (default: 8)")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--ctx", type=int, default=32768, help="tokens of each request (default: 32768)")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="without vLLM's kernels")
    parser.add_argument("--check", action="store_true", help="hold the pack's plans for checking against references")
    machine.add_arguments(parser, RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
