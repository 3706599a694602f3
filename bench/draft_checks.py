"""The draft's plans launch by launch against references, and replays against eager: `bin/bench-draft --check`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from bench import draft_scene
from bench.plan_pack import Packed
from jitspark.checking.packed import Kernels
from jitspark.checking.plan_arguments import random_step, random_weights
from jitspark.checking.plan_check import Bench, launch_by_launch, replayed
from jitspark.plans.plan import Plan, Stage

LENGTHS = (2055, 0, 71, 7, 2056, 70, 1000, 72)  # edges of blocks and windows, alone, padded, long


def checks(
    plans: Sequence[Packed], kernels: Kernels, numbers: Mapping[str, int], generator: torch.Generator
) -> Iterator[dict[str, Any]]:
    """What was found of each plan, printed as it comes; `numbers` are those that every plan is bound with."""
    for packed in plans:
        bench = _bench(packed.plan, kernels, numbers, generator)
        for outcome in (launch_by_launch(bench), replayed(bench)):
            said = "pass" if outcome.passed else "FAIL"
            print(f"{said}  {packed.title}: {outcome.title} {dict(outcome.margins)}", *outcome.problems[:4], sep="\n  ")
            yield {"plan": packed.title, "check": outcome.title, "problems": outcome.problems} | {
                "margins": dict(outcome.margins)
            }
        torch.cuda.empty_cache()


def _bench(plan: Plan, kernels: Kernels, numbers: Mapping[str, int], generator: torch.Generator) -> Bench:
    requests = plan.rows // plan.query_length
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(requests)]
    context = plan.stage == Stage.DRAFT_CONTEXT
    step = draft_scene.context_step(plan, generator) if context else random_step(plan, lengths, generator)
    weights = random_weights(plan, generator, max_positions=4096)
    return Bench(plan, kernels, weights, step, generator.device, numbers)
