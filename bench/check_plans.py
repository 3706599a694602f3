"""`bin/check-plans`: whole decode steps on this GPU, from a pack of bin/make-decode-pack.

Each plan for checking: launch by launch against its references, from equal inputs, in an arena of NaN; a captured
replay against an eager run; that a run neither allocates nor waits; two executors on two streams. Exit status 0 when
everything passed.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import machine, packed_cache
from bench.plan_pack import Packed, load_plan_kernels, read_plans
from jitspark.checking.packed import Kernels
from jitspark.checking.plan_check import Bench, Outcome, launch_by_launch, other_provider, quiet, replayed, side_by_side
from jitspark.errors import JitsparkError
from jitspark.plans.plan import CUTE, Stage
from jitspark.runtime.stock_ops import stock_operations

NUMBERS = {"rank": 1, "timeout_us": 200_000}
# Of each request, in turn: at the edges of blocks and windows, alone with its own rows, padded, long
LENGTHS = (2055, 0, 72, 8, 2056, 71, 1000, 73)


def check(
    plans: Sequence[Packed], stock: Sequence[Packed], kernels: Kernels, seed: int
) -> Iterator[tuple[str, Outcome]]:
    """(which plan, how it went) for everything that is checked of each plan, and the same steps of `stock`."""
    generator = torch.Generator(device="cuda").manual_seed(seed)
    before: Bench | None = None
    for packed in plans:
        bench = draw(packed, kernels, generator)
        yield packed.title, launch_by_launch(bench)
        yield packed.title, replayed(bench)
        yield packed.title, quiet(bench)
        for other in stock:
            if other.title == packed.title:
                yield other.title, other_provider(bench, other.plan, stock_operations())
        if packed.plan.stage == Stage.DECODE:
            yield packed.title, side_by_side(bench, before or bench)
            before = bench
        torch.cuda.empty_cache()


def draw(packed: Packed, kernels: Kernels, generator: torch.Generator) -> Bench:
    requests = packed.plan.rows // packed.plan.query_length
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(requests)]
    return Bench.draw(packed.plan, kernels, lengths, generator, NUMBERS)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"check-plans: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    target = machine.own_target()
    with packed_cache.cache_root(options) as root:
        every = [
            each for each in read_plans(root, "check", target) if options.geometry in (None, each.about["geometry"])
        ]
        plans = [each for each in every if each.about["provider"] == CUTE]
        kernels = load_plan_kernels(root, plans)
    stock = [each for each in every if each not in plans] if options.stock else []
    print(f"{len(plans)} plans, {len(kernels)} kernels for {target}, seed {options.seed}", flush=True)
    found: list[dict[str, Any]] = []
    for title, outcome in check(plans, stock, kernels, options.seed):
        print(line(title, outcome), flush=True)
        found.append({"plan": title, "check": outcome.title, "problems": outcome.problems, "margins": outcome.margins})
    if options.json:
        content = {"format": 1, "about": machine.description(options.commit), "seed": options.seed, "checks": found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    wrong = [each for each in found if each["problems"]]
    print(f"{len(found) - len(wrong)} of {len(found)} checks passed")
    return 1 if wrong else 0


def line(title: str, outcome: Outcome) -> str:
    worst = max(outcome.margins.items(), key=lambda each: each[1], default=None)
    margin = f" (worst margin {worst[1]:.3f}, {worst[0]})" if worst else ""
    problems = [f"      {text}" for text in outcome.problems[:8]]
    more = [f"      and {len(outcome.problems) - 8} more"] if len(outcome.problems) > 8 else []
    return "\n".join([f"{'pass' if outcome.passed else 'FAIL'}  {title}: {outcome.title}{margin}", *problems, *more])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bin/check-plans", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a new one")
    parser.add_argument("--geometry", metavar="NAME", help="only plans of this one")
    parser.add_argument("--stock", action="store_true", help="also the same steps of vLLM's kernels; needs vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--commit", default="", help="what the result says it was measured at")
    return parser


if __name__ == "__main__":
    sys.exit(main())
