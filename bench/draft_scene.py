"""What a draft step of one rank is bound to: weights, caches that both of its plans share, and the sampling loop's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from bench.markov_scene import Scene, make_scene
from jitspark.checking.plan_arguments import Step, random_step
from jitspark.plans.plan import Kind, Plan

Tensors = Mapping[str, Tensor]


def context_step(plan: Plan, generator: Generator, caches: Tensors | None = None, max_positions: int = 4096) -> Step:
    """Random context rows with a place of their own in each layer's cache; every ninth row has none.

    Without `caches` each layer gets one that holds them all. Block 0 stays nobody's.
    """
    device, buffers = generator.device, plan.buffer_named()
    names = [name for name in buffers if buffers[name].kind == Kind.KV_CACHE]
    made = dict(caches or {name: _cache(buffers[name].shape, plan.rows, generator) for name in names})
    inputs = {}
    for name in names:
        places = (len(made[name]) - 1) * 16
        slots = 16 + torch.randperm(places, generator=generator, device=device)[: plan.rows]
        slots[5::9] = -1
        inputs[f"{name.removesuffix('kv_cache')}slot_mapping"] = slots
    for name in ("context", "taps"):
        if name in buffers and buffers[name].kind == Kind.INPUT:
            shape = tuple(int(size) for size in buffers[name].shape)
            inputs[name] = torch.randn(shape, generator=generator, device=device).bfloat16()
    if "positions" in buffers:
        inputs["positions"] = torch.randint(max_positions, (plan.rows,), generator=generator, device=device)
    return Step(inputs, {name: made[name] for name in names})


def _cache(shape: tuple[Any, ...], rows: int, generator: Generator) -> Tensor:
    size = (2 + rows // 8, *(int(each) for each in shape[1:]))
    return torch.randn(size, generator=generator, device=generator.device).bfloat16()


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of the three parts of a draft step. The context rows lie in the caches that the forward reads."""

    context: Step
    forward: Step
    sampling: Scene


def step_inputs(context: Plan, forward: Plan, seq_len: int, generator: Generator, words: int, rows: int) -> StepInputs:
    """Requests of `seq_len` tokens; the sampling loop over `rows` tokens of the vocabulary, with `words` of memory."""
    requests = forward.rows // forward.query_length
    step = random_step(forward, [seq_len] * requests, generator)
    stored = context_step(context, generator, step.kv_caches, max_positions=seq_len)
    return StepInputs(stored, step, make_scene(requests, rows, generator, words))


def sampling_tensors(scene: Scene) -> dict[str, Tensor]:
    """The scene as the sampling plan names it, without its weights."""
    names = (
        *("input_ids", "anchor_idx", "sample_idx_mapping", "sample_pos", "seeds", "temperature"),
        *("draft_tokens", "draft_logits", "exchange"),
    )
    return {name: getattr(scene, name) for name in names}
