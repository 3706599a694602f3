"""The Markov sampling loop's exchange between ranks, on one GPU, or (`--devices 2`) between two of one host.

    python -m bench.markov_exchange_check --pack FILE.tar --json FILE

Two ranks of the tiny draft, on two streams or GPUs at once, each with half of the vocabulary: both must find the tokens
and, side by side, the logits of one launch over the whole. And one rank of TP 8 whose table of peers holds nothing but
its own address: all ranks then find what it finds, so its tokens must be those without an exchange. Status 1 if not.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import machine, packed_cache
from bench.markov_scene import MAX_REQUESTS, Scene, kernels, make_scene, specialization
from kernel_specs.markov_gumbel_sampling.spec import NUM_STEPS, specialize

TINY_VOCAB, TINY_RANK, RANKS = 2048, 32, 2
TP8_ROWS, TP8 = 25256, 8


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    target = machine.own_target()
    wanted = [
        specialize(TINY_VOCAB, TINY_VOCAB, TINY_RANK, NUM_STEPS, capped=True),
        specialize(TINY_VOCAB, TINY_VOCAB // RANKS, TINY_RANK, NUM_STEPS, capped=True, world_size=RANKS),
        specialization(TP8_ROWS),
        specialization(TP8_ROWS, world_size=TP8),
    ]
    words = [each.axes["exchange_words"] for each in wanted]
    with packed_cache.cache_root(options) as root:
        whole, half, alone, one_of_eight = kernels(root, wanted, target)
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    found: dict[str, Any] = {"about": machine.description(options.commit), "seed": options.seed}
    found["two_ranks"] = {"launches": 0, "wrong": 0}
    found["own_table"] = {"launches": 0, "wrong": 0}
    for requests in (1, 2, 5, 8):
        scene = make_scene(requests, TINY_VOCAB, generator, words[0], TINY_VOCAB, TINY_RANK)
        devices = [f"cuda:{rank % options.devices}" for rank in range(RANKS)]
        _two_ranks(found["two_ranks"], scene, whole, half, words[1], devices, generator, options.rounds)
        scene = make_scene(requests, TP8_ROWS, generator, words[2])
        _own_table(found["own_table"], scene, alone, one_of_eight, generator, options.rounds)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if found["two_ranks"]["wrong"] or found["own_table"]["wrong"] else 0


def _two_ranks(
    counts: dict[str, int],
    scene: Scene,
    whole: Any,
    half: Any,
    words: int,
    devices: list[str],
    generator: torch.Generator,
    rounds: int,
) -> None:
    shards = [scene.shard(rank, RANKS, words).to(device) for rank, device in enumerate(devices)]
    winners = [each.to(device) for each, device in zip(_winners(RANKS), devices, strict=True)]
    addresses = torch.tensor([each.data_ptr() for each in winners])
    peers = [addresses.to(device) for device in devices]
    logits = [torch.zeros_like(each.base_logits) for each in shards]
    streams = [torch.cuda.Stream(device) for device in devices]
    for one in winners:  # a copy between GPUs lets each map the other's memory
        for other in winners:
            other.copy_(one)
    for _ in range(rounds):
        scene.refresh(generator)
        for shard in shards:
            shard.take(scene)
        whole(*scene.arguments())
        _synchronize(devices)
        for _ in range(3):  # one behind the other, without waiting for both ranks
            for rank in random.sample(range(RANKS), RANKS):
                with torch.cuda.device(devices[rank]), torch.cuda.stream(streams[rank]):
                    half(*shards[rank].exchanged_arguments(rank, logits[rank], winners[rank], peers[rank]))
        _synchronize(devices)
        cached = scene.draft_logits[scene.sample_idx_mapping[:, 0]]
        found = torch.cat([each.to(cached.device) for each in logits], dim=-1)
        same = all(torch.equal(shard.draft_tokens.to(cached.device), scene.draft_tokens) for shard in shards)
        counts["launches"] += 3 * RANKS
        counts["wrong"] += not (same and torch.equal(found, cached) and not _stuck(*shards))


def _synchronize(devices: list[str]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _own_table(
    counts: dict[str, int], scene: Scene, alone: Any, exchanged: Any, generator: torch.Generator, rounds: int
) -> None:
    (winners, *_) = _winners(TP8)
    peers = torch.full((TP8,), winners.data_ptr(), device="cuda")
    logits = torch.zeros_like(scene.base_logits)
    for number in range(rounds):
        scene.refresh(generator)
        alone(*scene.arguments())
        wanted = scene.draft_tokens.clone()
        scene.draft_tokens.zero_()
        torch.cuda.synchronize()
        exchanged(*scene.exchanged_arguments(number % TP8, logits, winners, peers))
        states, end = scene.sample_idx_mapping[:, 0], scene.first_token + scene.vocab_rows
        cached = scene.draft_logits[states, :, scene.first_token : end]
        good = torch.equal(wanted, scene.draft_tokens) and torch.equal(cached, logits) and not _stuck(scene)
        counts["launches"] += 1
        counts["wrong"] += not good


def _winners(ranks: int) -> list[torch.Tensor]:
    return [torch.zeros(NUM_STEPS, MAX_REQUESTS, ranks, dtype=torch.int64, device="cuda") for _ in range(ranks)]


def _stuck(*scenes: Scene) -> bool:
    return any(scene.stuck() for scene in scenes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.markov_exchange_check", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--devices", type=int, choices=(1, 2), default=1, help="GPUs that the two ranks are on")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a new one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", default="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
