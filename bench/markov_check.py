"""The Markov sampling loop on this GPU, against its reference: tokens, cached rows, odd inputs, and many launches.

    python -m bench.markov_check --pack FILE.tar --json FILE

Counts, with fresh inputs of TP 8's sizes: tokens unlike the float64 reference's on the same cached row; cached values
unlike the reference's, which is led along the kernel's own tokens; tokens that the kernel's own arithmetic does not
find again in its cached rows (a launch with a weight of zeros and no transform); and, where vLLM is installed, tokens
that vLLM's sampler does not draw from them. Exit status 1 when a count is too high.
"""

import argparse
import importlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench import machine, packed_cache
from bench.markov_scene import MULTIPLIER, SOFT_CAP, Scene, kernels, make_scene, specialization
from jitspark.checking.check import cuda_graph
from kernel_specs.markov_gumbel_sampling import reference
from kernel_specs.markov_gumbel_sampling.spec import NUM_STEPS

VOCAB_ROWS = 25256
ALLOWED_EXCEPTIONS = 1e-4  # of tokens, for the two approximations of FP32
EDGES = (0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**63 - 1, -(2**63))
TOKEN_COUNTS = ("tokens", "tokens_unlike_reference", "tokens_not_found_again")
# cached values, those unlike the reference's, those further away than one ulp, and those that no bias within one ulp of
# the reference's would give within one ulp: where a bias rounds the other way and the sum cancels, its ulp remains
VALUE_COUNTS = ("values", "flipped", "beyond_one_ulp", "unexplained")
Sampler = Callable[..., torch.Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    target = machine.own_target()
    wanted = [specialization(VOCAB_ROWS, capped=True), specialization(VOCAB_ROWS, capped=False)]
    with packed_cache.cache_root(options) as root:
        capped, plain = kernels(root, wanted, target)
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    scenes = [
        make_scene(requests, VOCAB_ROWS, generator, wanted[0].axes["exchange_words"]) for requests in (1, 2, 3, 5, 8)
    ]
    found: dict[str, Any] = {"about": machine.description(options.commit), "seed": options.seed}
    found["sampled"] = _sampled(scenes, capped, plain, generator, options.rounds)
    found["odd_inputs"] = _odd_inputs(scenes[-1], plain, generator)
    found["launches"] = _many_launches(scenes[-1], capped, options.launches)
    found["stuck"] = any(scene.stuck() for scene in scenes)
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if _fine(found) else 1


def _fine(found: dict[str, Any]) -> bool:
    sampled = found["sampled"]
    return (
        sampled["tokens_unlike_reference"] <= ALLOWED_EXCEPTIONS * sampled["tokens"]
        and sampled["tokens_not_found_again"] == 0
        and sampled["unexplained"] == 0
        and found["odd_inputs"]["wrong"] == []
        and found["launches"]["unlike_the_first"] == 0
        and not found["stuck"]
    )


def _sampled(scenes: list[Scene], capped: Any, plain: Any, generator: torch.Generator, rounds: int) -> dict[str, Any]:
    """Counts over `rounds` draws of each scene."""
    counts = dict.fromkeys((*TOKEN_COUNTS, *VALUE_COUNTS), 0)
    vllm_sampler = _vllm_sampler()
    others = {"tokens_unlike_vllm": 0} if vllm_sampler else {}
    for scene in scenes:
        zeros = torch.zeros_like(scene.markov_w2)
        for number in range(rounds):
            scene.refresh(generator)
            if number % 4 == 3:
                scene.temperature[: scene.num_requests : 2] = 0.0
            capped(*scene.arguments())
            tokens, rows = scene.draft_tokens.clone(), _cached_rows(scene)
            for name, count in zip(VALUE_COUNTS, _differences(scene, tokens, rows), strict=True):
                counts[name] += count
            counts["tokens"] += tokens.numel()
            counts["tokens_unlike_reference"] += int((_reference_tokens(scene, rows) != tokens).sum())
            counts["tokens_not_found_again"] += int((_found_again(scene, plain, rows, zeros) != tokens).sum())
            if vllm_sampler:
                others["tokens_unlike_vllm"] += int((_vllm_tokens(scene, rows, vllm_sampler) != tokens).sum())
    return {**counts, **others, "flip_rate": counts["flipped"] / counts["values"]}


def _cached_rows(scene: Scene) -> torch.Tensor:
    """The shard's part of the cache, [num_requests, num_steps, vocab_rows]."""
    states = scene.sample_idx_mapping[:, 0]
    return scene.draft_logits[states, :, scene.first_token : scene.first_token + scene.vocab_rows].clone()


def _differences(scene: Scene, tokens: torch.Tensor, rows: torch.Tensor) -> tuple[int, ...]:
    """The `VALUE_COUNTS` of a launch, whose tokens the reference is led along."""
    previous = scene.input_ids[scene.anchor_idx].long()
    counts = torch.zeros(3, dtype=torch.int64, device=rows.device)
    for step in range(NUM_STEPS):
        bias = reference.rounded_product(scene.markov_w1[previous], scene.markov_w2)
        low, wanted, high = (
            _ordered(reference.transform(scene.base_logits[:, step] + near, MULTIPLIER, SOFT_CAP))
            for near in (_neighbour(bias, -1), bias, _neighbour(bias, 1))
        )
        got = _ordered(rows[:, step])
        distance = (got - wanted).abs()
        unexplained = (got < low - 1) | (got > high + 1)
        counts += torch.stack([(distance > 0).sum(), (distance > 1).sum(), unexplained.sum()])
        previous = tokens[:, step]
    return (rows.numel(), *counts.tolist())


def _ordered(values: torch.Tensor) -> torch.Tensor:
    """BF16 values as integers that count in ulp; both zeros are 0."""
    word = values.contiguous().view(torch.int16).int()
    return torch.where(word < 0, -(word & 0x7FFF), word)


def _neighbour(values: torch.Tensor, distance: int) -> torch.Tensor:
    """The BF16 values that lie `distance` ulp above."""
    word = _ordered(values) + distance
    return torch.where(word < 0, -word - 0x8000, word).to(torch.int16).view(torch.bfloat16)


def _reference_tokens(scene: Scene, rows: torch.Tensor) -> torch.Tensor:
    """What the reference draws from given rows."""
    states = scene.sample_idx_mapping[:, 0]
    token_ids = scene.first_token + torch.arange(scene.vocab_rows, device=rows.device)
    drawn = []
    for step in range(NUM_STEPS):
        positions = scene.sample_pos[:, step]
        noised = reference.noised_logits(
            rows[:, step], scene.temperature[states], scene.seeds[states], positions, step, token_ids
        )
        drawn.append(token_ids[noised.argmax(dim=-1)])
    return torch.stack(drawn, dim=1)


def _found_again(scene: Scene, plain: Any, rows: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """The kernel's own choice from given rows: they are its base logits, and nothing is added to them."""
    torch.cuda.synchronize()
    plain(*replace(scene, base_logits=rows, markov_w2=zeros).arguments(capped=False))
    return scene.draft_tokens.clone()


def _vllm_sampler() -> Sampler | None:
    try:
        found: Sampler = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel").gumbel_sample
    except ImportError:
        return None
    return found


def _vllm_tokens(scene: Scene, rows: torch.Tensor, sampler: Sampler) -> torch.Tensor:
    """What vLLM draws from given rows; ids outside the shard get -inf."""
    whole = torch.full((scene.num_requests, scene.draft_logits.shape[-1]), float("-inf"), device=rows.device)
    whole = whole.to(torch.bfloat16)
    cache = torch.zeros_like(scene.draft_logits)
    drawn = []
    for step in range(NUM_STEPS):
        whole[:, scene.first_token : scene.first_token + scene.vocab_rows] = rows[:, step]
        column = torch.tensor(step, dtype=torch.int32, device=rows.device)
        tokens = sampler(
            whole, scene.sample_idx_mapping[:, step], scene.temperature, scene.seeds, scene.sample_pos[:, step] - 1,
            apply_temperature=True, is_drafting=True, logits_cache=cache, logits_cache_col=column,
        )  # fmt: skip
        drawn.append(tokens)
    return torch.stack(drawn, dim=1)


def _odd_inputs(scene: Scene, plain: Any, generator: torch.Generator) -> dict[str, Any]:
    """NaN, infinities, equal values, inert requests, seeds and positions at the ends of int64."""
    scene.refresh(generator)
    scene.temperature[::2] = 0.0
    mapping = scene.sample_idx_mapping.clone()
    scene.sample_idx_mapping[3] = -1
    scene.seeds.copy_(torch.tensor(EDGES))
    scene.sample_pos.copy_(torch.tensor(EDGES)[:, None].expand(-1, NUM_STEPS))
    rows = scene.base_logits.clone()
    rows[:, 0, 100::7] = 50.0  # many equal
    rows[:, 1] = float("-inf")
    rows[:, 2, [5000, 77, 20000]] = float("inf")
    rows[:, 3, [9000, 444]] = float("nan")
    rows[:, 4] = torch.where(rows[:, 4] > 0, -0.0, rows[:, 4])
    rows[:, 4, 15] = 0.0
    rows[:, 5] = float("nan")
    before = scene.draft_logits.clone()
    got = _found_again(scene, plain, rows, torch.zeros_like(scene.markov_w2))
    wanted = _wanted_of_odd(scene, rows)
    wrong = [f"request {r} step {j}: {got[r, j]} for {wanted[r, j]}" for r, j in (got != wanted).nonzero().tolist()]
    kept = torch.ones(scene.draft_logits.shape[0], dtype=torch.bool)
    kept[scene.sample_idx_mapping[:, 0][scene.sample_idx_mapping[:, 0] >= 0].cpu()] = False
    same = before.view(torch.int16)[kept.cuda()] == scene.draft_logits.view(torch.int16)[kept.cuda()]
    scene.sample_idx_mapping.copy_(mapping)
    return {"wrong": wrong + ([] if bool(same.all()) else ["an inert request's state was written"])}


def _wanted_of_odd(scene: Scene, rows: torch.Tensor) -> torch.Tensor:
    """The reference's tokens, an inert request being greedy."""
    state = scene.sample_idx_mapping[3, 0].clone()
    temperature = scene.temperature.clone()
    other = int(scene.sample_idx_mapping.shape[0] - 1 - 3)  # the state that this request had
    scene.sample_idx_mapping[3] = other
    scene.temperature[other] = 0.0
    wanted = _reference_tokens(scene, rows)
    scene.temperature.copy_(temperature)
    scene.sample_idx_mapping[3] = state
    return wanted


def _many_launches(scene: Scene, capped: Any, launches: int) -> dict[str, Any]:
    """Launches one behind the other in graphs, through the epochs' end: all must do the same."""
    capped(*scene.arguments())
    first = scene.draft_tokens.clone()
    outputs = [torch.zeros_like(first) for _ in range(10)]

    def ten() -> None:
        for output in outputs:
            capped(*replace(scene, draft_tokens=output).arguments())

    replay = cuda_graph(ten)
    unlike = 0
    for _ in range(launches // 10):
        replay()
        unlike += sum((output != first).any().int() for output in outputs)
    return {"launches": launches, "unlike_the_first": int(unlike)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.markov_check", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--launches", type=int, default=40000, help="more than two turns of the epochs")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a new one")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", default="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
