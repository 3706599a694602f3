"""The draft's Markov sampling loop on this GPU: one launch over a vocabulary shard, with --stock beside vLLM's loop.

    python -m bench.markov --pack FILE.tar --out DIR

Stock is what vLLM does without us: per step an embedding, a product with the whole, replicated weight, the transform,
a scatter, vLLM's own sampler (where vLLM is installed; else a torch restatement of it, and the result says so). Weights
rotate over more memory than L2 holds, as the rest of a step would have driven them out. Captured in CUDA graphs,
replayed in turn in the same run.
"""

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench import machine, packed_cache
from bench.markov_scene import (
    MARKOV_RANK,
    MAX_REQUESTS,
    MULTIPLIER,
    SOFT_CAP,
    VOCAB_SIZE,
    Scene,
    kernels,
    make_scene,
    specialization,
)
from bench.timing import chain, read_rate, time_chains
from kernel_specs.markov_gumbel_sampling import reference
from kernel_specs.markov_gumbel_sampling.spec import NUM_STEPS

ROTATED_BYTES = 240e6  # of weights, so that each launch reads them from memory
WARM = "warm"  # the same weight every time: what L2 would give
LOCAL = "local_exchange"  # one rank of several, whose peers are itself

Call = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    target = machine.own_target()
    wanted = {tp: specialization(VOCAB_SIZE // tp) for tp in options.tp}
    exchanged = [specialization(VOCAB_SIZE // tp, world_size=tp) for tp in options.tp]
    with packed_cache.cache_root(options) as root:
        loaded = kernels(root, [*wanted.values(), *exchanged], target)
    functions = dict(zip(wanted, zip(loaded[: len(wanted)], loaded[len(wanted) :], strict=True), strict=True))
    generator = torch.Generator(device="cuda").manual_seed(0)
    about = machine.description(options.commit)
    found: dict[str, Any] = {"about": about, "read_tb_per_s": read_rate() / 1e6, "runs": []}
    for tp, (function, with_peers) in functions.items():
        for requests in options.requests:
            made = make_scene(requests, VOCAB_SIZE // tp, generator, wanted[tp].axes["exchange_words"])
            run = _measure(made, function, with_peers, tp, generator, stock=options.stock and tp == options.tp[0])
            found["runs"].append(
                {"tp": tp, "requests": requests, **_floors(tp, requests, found["read_tb_per_s"]), **run}
            )
            print(json.dumps(found["runs"][-1]), flush=True)
    path = options.out / f"{machine.file_stem('markov', about)}.json"
    path.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _floors(tp: int, requests: int, rate: float) -> dict[str, float]:
    """Times to read the weight's shard once, to read it in every step, and the whole weight in every step."""
    shard = VOCAB_SIZE // tp * MARKOV_RANK * 2
    base = requests * NUM_STEPS * (VOCAB_SIZE // tp) * 2
    floors = {"once": shard + base, "each_step": NUM_STEPS * shard + base, "stock": NUM_STEPS * tp * shard}
    return {f"floor_{name}_us": num_bytes / rate / 1e6 for name, num_bytes in floors.items()}


def _measure(
    scene: Scene, function: Any, with_peers: Any, tp: int, generator: torch.Generator, *, stock: bool
) -> dict[str, Any]:
    calls = _calls(scene, function)
    exchanged = _exchanged_calls(scene, with_peers, tp)
    count = 2 * len(calls)
    chains = {"kernel": chain(calls, count), WARM: chain(calls[:1], count), LOCAL: chain(exchanged, count)}
    timings = time_chains(chains, count, 21)
    result: dict[str, Any] = {f"{name}_us": timing.median_us for name, timing in timings.items()}
    result |= {"kernel_p10_us": timings["kernel"].p10_us, "kernel_p90_us": timings["kernel"].p90_us}
    if stock:
        sampler = vllm_sampler()
        loop = stock_loop(scene.num_requests, generator, sampler or restated_sampler)
        timing = time_chains({"stock": chain([loop], 2)}, 2, 11)["stock"]
        result |= {"stock_us": timing.median_us, "stock_sampler": "vllm" if sampler else "restated"}
    return result | {"stuck": scene.stuck()}


def _calls(scene: Scene, function: Any) -> list[partial[object]]:
    """Calls with weights of their own each."""
    num_bytes = scene.markov_w2.numel() * 2
    weights = [scene.markov_w2.clone() for _ in range(max(2, -(-int(ROTATED_BYTES) // num_bytes)))]
    return [partial(function, *replace(scene, markov_w2=weight).arguments()) for weight in weights]


def _exchanged_calls(scene: Scene, function: Any, ranks: int) -> list[partial[object]]:
    """Calls of one rank of several, all of whose peers are itself: the exchange without the way between GPUs."""
    winners = torch.zeros(NUM_STEPS, MAX_REQUESTS, ranks, dtype=torch.int64, device="cuda")
    peers = torch.full((ranks,), winners.data_ptr(), device="cuda")
    logits = torch.zeros_like(scene.base_logits)
    weights = [call.args[2] for call in _calls(scene, function)]
    return [
        partial(function, *replace(scene, markov_w2=weight).exchanged_arguments(0, logits, winners, peers))
        for weight in weights
    ]


def vllm_sampler() -> Callable[..., torch.Tensor] | None:
    try:
        found: Callable[..., torch.Tensor] = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample
    except ImportError:
        return None
    return found


def restated_sampler(
    logits: torch.Tensor,
    states: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    *,
    logits_cache: torch.Tensor,
    logits_cache_col: torch.Tensor,
    **_: object,
) -> torch.Tensor:
    """What vLLM's sampler does, in torch operations: not what it costs."""
    logits_cache[states, logits_cache_col] = logits
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    noised = reference.noised_logits(logits, temperature[states], seeds[states], positions + 1, 0, token_ids)
    return noised.argmax(dim=-1)


def stock_loop(num_requests: int, generator: torch.Generator, sampler: Callable[..., torch.Tensor]) -> Call:
    """The loop as vLLM's speculator runs it for a draft with a vocabulary map, over the whole vocabulary."""
    scene = make_scene(num_requests, VOCAB_SIZE, generator, 1)
    scattered = torch.full((num_requests, VOCAB_SIZE), float("-inf"), dtype=torch.bfloat16, device="cuda")
    token_ids = torch.arange(VOCAB_SIZE, device="cuda")
    columns = torch.arange(NUM_STEPS, dtype=torch.int32, device="cuda")

    def loop() -> None:
        previous = scene.input_ids[scene.anchor_idx].long()
        for step in range(NUM_STEPS):
            bias = torch.nn.functional.linear(torch.nn.functional.embedding(previous, scene.markov_w1), scene.markov_w2)
            logits = (scene.base_logits[:, step] + bias).float() * MULTIPLIER
            logits = SOFT_CAP * torch.tanh(logits / SOFT_CAP)
            scattered.index_copy_(1, token_ids, logits.to(torch.bfloat16))
            previous = sampler(
                scattered, scene.sample_idx_mapping[:, step], scene.temperature, scene.seeds,
                scene.sample_pos[:, step] - 1, apply_temperature=True, is_drafting=True,
                logits_cache=scene.draft_logits, logits_cache_col=columns[step],
            )  # fmt: skip
            scene.draft_tokens[:, step] = previous

    return loop


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.markov", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--tp", type=int, nargs="+", default=[8, 16, 4])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--stock", action="store_true", help="also the stock loop, beside the first TP size")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--commit", default="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
