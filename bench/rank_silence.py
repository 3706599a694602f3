"""`python -m bench.rank_silence`: a rank dies, or stands still, while a TP group replays captured steps on its GPUs.

A process and a GPU per rank, from a pack of `python -m bench.ranks_pack`: the decode step of a tiny model (or of a few
real layers), or the draft's sampling loop, with the watches of `runtime/silence.py` asked before each replay, as a
server asks them. Amid the replays rank 1 gets SIGKILL (--how kill) or SIGSTOP (stop). Every other rank must end in
bounded time with a RankError that names it: once a kernel has waited for `--timeout` seconds, and what is behind it in
the graph has not waited again. Exit status 0 when all did.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import draft_scene, machine, packed_cache
from bench.check_ranks import LENGTHS, own_shares
from bench.collectives_rank import Place, joined
from bench.markov_scene import make_scene
from bench.plan_pack import Packed, load_plan_kernels, read_plans
from bench.rank_group import leave, started
from jitspark.checking.check import cuda_graph
from jitspark.checking.packed import Kernels
from jitspark.checking.plan_arguments import random_step, random_weights
from jitspark.errors import RankError
from jitspark.plans.bound_plan import BLOCK_SIZE
from jitspark.plans.executor import Executor
from jitspark.plans.markov import FIRST_TOKEN
from jitspark.plans.plan import Kind, Plan
from jitspark.runtime.markov_launches import SamplingWatch
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.silence import require_all_heard
from jitspark.runtime.symmetric_memory import ExchangeMemory, SilentRankWatch, exchange_memory

SILENT = 1
READY_REPLAYS = 200  # before a rank says that it is ready
LONGEST = 90.0  # seconds that a rank goes on replaying
SLACK = 5.0  # seconds beside what kernels wait
SAMPLING_PATIENCE = 50.0  # seconds: twice what the sampling loop waits, which counts rounds of polling


def decode(packed: Packed, kernels: Kernels, memory: ExchangeMemory, place: Place, seed: int) -> Callable[[], None]:
    """The step of a decode plan, and its word's way to the host."""
    plan = packed.plan
    generator = torch.Generator(device=place.device).manual_seed(seed)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(plan.rows // plan.query_length)]
    weights = random_weights(plan, generator, max_positions=max(BLOCK_SIZE, *lengths))
    step = random_step(plan, lengths, generator)
    tensors = {**own_shares(plan, weights, place.group.rank), **step.inputs, **step.kv_caches}
    executor = Executor(plan, kernels, tensors, place.device, numbers=memory.numbers, symmetric=memory.of(plan))
    watch = SilentRankWatch((plan,), memory)

    def run() -> None:
        executor.run()
        watch.note(plan)

    return run


def sampling(packed: Packed, kernels: Kernels, memory: ExchangeMemory, place: Place, seed: int) -> Callable[[], None]:
    """The draft's sampling loop over this rank's half of a vocabulary, and its words' way to the host."""
    plan, rank, size = packed.plan, place.group.rank, place.group.size
    buffers = plan.buffer_named()
    generator = torch.Generator(device=place.device).manual_seed(seed)
    vocab_size, markov_rank = _shape(plan, "markov_w1")
    rows, _ = _shape(plan, "markov_w2")
    (words,) = _shape(plan, "exchange")
    requests = plan.rows // plan.query_length
    scene = make_scene(requests, vocab_size, generator, words, vocab_size, markov_rank).shard(rank, size, words)
    weights = {
        name: torch.randn(_shape(plan, name), generator=generator, device=place.device).bfloat16()
        for name, buffer in buffers.items()
        if buffer.kind == Kind.WEIGHT and name not in ("markov_w1", "markov_w2")
    }
    hidden = torch.randn(_shape(plan, "hidden"), generator=generator, device=place.device).bfloat16()
    tensors = {**draft_scene.sampling_tensors(scene), **weights, "hidden": hidden}
    tensors |= {"markov_w1": scene.markov_w1, "markov_w2": scene.markov_w2}
    numbers = {**memory.numbers, FIRST_TOKEN: rank * rows}
    executor = Executor(plan, kernels, tensors, place.device, numbers=numbers, symmetric=memory.of(plan))
    watch = SamplingWatch({requests: plan}, memory, {requests: scene.exchange})
    executor.run()
    tokens = place.group.gather(scene.draft_tokens)
    assert torch.equal(tokens[0], tokens[-1]), "ranks that draw other tokens"

    def run() -> None:
        executor.run()
        watch.note(requests)

    return run


def _shape(plan: Plan, name: str) -> tuple[int, ...]:
    return tuple(int(size) for size in plan.buffer_named()[name].shape)


def replay_until_told(run: Callable[[], None], seconds: float) -> int:
    """Replays, each of which the host waits for, as a server does for its tokens. Raises RankError when told of one."""
    run()
    replay = cuda_graph(run)
    end = time.monotonic() + seconds
    replays = 0
    while time.monotonic() < end:
        require_all_heard()
        replay()
        torch.cuda.synchronize()
        replays += 1
        if replays == READY_REPLAYS:
            _say(ready=replays)
    return replays


def _say(**told: Any) -> None:
    print(json.dumps({**told, "at": time.time()}), flush=True)


def _rank(options: argparse.Namespace) -> int:
    place = joined(options)
    group = RankGroup(options.rank, options.world, dist.group.WORLD, dist.group.WORLD, options.patience)
    target = machine.own_target()
    with packed_cache.cache_root(options) as root:
        plans = [each for each in read_plans(root, options.step, target) if each.plan.tp == group.size]
        packed = plans[options.plan]
        kernels = load_plan_kernels(root, [packed])
    timeout_us = round(1e6 * options.timeout)
    memory = exchange_memory((packed.plan,), group, place.device, (group.size,), timeout_us=timeout_us)
    make = sampling if options.step == "sampling" else decode
    run = make(packed, kernels, memory, place, options.seed)
    place.barrier()
    _say(plan=packed.title)
    try:
        replays = replay_until_told(run, LONGEST)
    except RankError as error:
        _say(**error.to_json())
        return 3
    _say(replays=replays)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.rank is not None:
        leave(_rank(options))
    with started("bench.rank_silence", given, options.world) as ranks:
        found = _silenced(ranks, options)
    found = {"about": machine.description(options.commit), "step": options.step, "how": options.how, **found}
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    print("all right" if not found["problems"] else "NOT all right")
    return 1 if found["problems"] else 0


def _silenced(ranks: Sequence[subprocess.Popen[str]], options: argparse.Namespace) -> dict[str, Any]:
    told: list[dict[str, Any]] = [{} for _ in ranks]
    for rank, process in enumerate(ranks):
        _read(process, told[rank], "ready")
    time.sleep(0.2 + 0.3 * random.random())  # somewhere within a replay
    silenced = time.time()
    ranks[SILENT].send_signal(signal.SIGKILL if options.how == "kill" else signal.SIGSTOP)
    problems, others = [], []
    bound = SLACK + (2 * options.timeout if options.step == "ranks" else options.timeout + SAMPLING_PATIENCE)
    for rank in (each for each in range(options.world) if each != SILENT):
        _read(ranks[rank], told[rank], "error", "replays")
        seconds = told[rank].get("at", time.time()) - silenced
        status = _ended(ranks[rank])
        others.append(
            {"rank": rank, "seconds": seconds, "status": status, "ended": time.time() - silenced, **told[rank]}
        )
        if told[rank].get("error") != "RankError" or f"rank {SILENT} " not in told[rank]["found"]:
            problems.append(f"rank {rank} said {told[rank]}")
        if not 0 < seconds < bound:
            problems.append(f"rank {rank} was told after {seconds:.1f} s, where {bound:.1f} are enough")
        if status is None:
            problems.append(f"rank {rank} did not end")
    return {"timeout": options.timeout, "bound": bound, "others": others, "problems": problems}


def _read(process: subprocess.Popen[str], told: dict[str, Any], *names: str) -> None:
    """What a rank says, until it has said one of these, or has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        told.update(json.loads(line) if line.startswith("{") else {})
        if told.keys() & set(names):
            return


def _ended(process: subprocess.Popen[str]) -> int | None:
    try:
        return process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.rank_silence", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument(
        "--step", choices=("ranks", "sampling"), default="ranks", help="decode steps, or the draft's loop"
    )
    parser.add_argument("--plan", type=int, default=0, help="which of the pack's plans for it (default: the first)")
    parser.add_argument(
        "--how", choices=("kill", "stop"), default="kill", help="what happens to rank 1 (default: kill)"
    )
    parser.add_argument("--timeout", type=float, default=2.0, help="seconds that a kernel waits (default: 2)")
    parser.add_argument("--world", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for another rank (default: 60)")
    parser.add_argument("--same-gpu", action="store_true", help="all ranks on one GPU")
    parser.add_argument("--seed", type=int, default=20260, help="of weights and inputs")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", default="")
    parser.set_defaults(device="cuda", replays=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
