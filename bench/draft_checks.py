"""The draft's plans launch by launch against references, and replays against eager: `bin/bench-draft --check`.

Also how far what the bench times is from vLLM's, in the same run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from bench import draft_scene
from bench.plan_pack import Packed
from jitspark.checking.packed import Kernels
from jitspark.checking.plan_arguments import Step, random_step, random_weights
from jitspark.checking.plan_check import Bench, launch_by_launch, replayed
from jitspark.plans.plan import Plan, Stage

Call = Callable[[], object]
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


def apart(
    ours: Mapping[str, Sequence[Call]],
    theirs: Mapping[str, Sequence[Call]],
    made: draft_scene.StepInputs,
    plans: tuple[Plan, Plan],
) -> dict[str, float]:
    """How far the same work of both is from each other: the norm of the difference over the norm.

    Not where rows are summed in two shots: a rank that is its own peer gets its own columns in the others' places.
    """
    found = {}
    for part, step, plan in zip(("context", "forward"), (made.context, made.forward), plans, strict=True):
        if any(launch.statics.get("shots") == 2 for launch in plan.launches):
            continue
        written = []
        for calls in (ours, theirs):
            calls[part][0]()
            torch.cuda.synchronize()
            written.append(_written(step).float())
        mine, stock = written
        found[part] = float((mine - stock).norm() / mine.norm())
    return found


def _written(step: Step) -> torch.Tensor:
    """The keys and values in the slots of a step, of all its layers."""
    rows = []
    for name, cache in step.kv_caches.items():
        slots = step.inputs[f"{name.removesuffix('kv_cache')}slot_mapping"]
        slots = slots[slots >= 0]
        rows.append(cache[slots // 16, :, slots % 16].flatten())
    return torch.cat(rows)
