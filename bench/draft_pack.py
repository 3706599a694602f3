"""`python -m bench.draft_pack`: the draft's plans and kernels that bin/bench-draft runs, in one tar.

Made without a GPU, where geometries can be read. As in bench.decode_pack's a plan lies in plans-v1 under its digest,
and the manifest says which plan is for what.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.decode_pack import entries_of
from bench.make_pack import files_of, write
from bench.packed_cache import MANIFEST
from jitspark.cache.store import PLANS, Entry
from jitspark.errors import JitsparkError
from jitspark.geometry import Deployment, deployment
from jitspark.key import Key
from jitspark.plans.builder import Keys
from jitspark.plans.draft import context_plan, draft_plan
from jitspark.plans.format import digest_in, to_bytes
from jitspark.plans.markov import markov_plan
from jitspark.plans.plan import CUTE, Plan
from jitspark.registry import specializations
from jitspark.runtime.parts import PARTS, STOCK
from jitspark.settings import from_environment
from jitspark.target import TARGETS


@dataclass(frozen=True, slots=True)
class Made:
    """A plan, what it is for ("bench" or "check"), and who serves it."""

    purpose: str
    served: Deployment
    provider: str
    plan: Plan

    def listed(self, digest: str) -> dict[str, object]:
        return {
            "purpose": self.purpose,
            "geometry": self.served.backbone.name,
            "layers": self.served.draft.num_hidden_layers,
            "tp": self.plan.tp,
            "rows": self.plan.rows,
            "requests": self.plan.rows // self.plan.query_length,
            "stage": self.plan.stage.value,
            "provider": self.provider,
            "plan": digest,
        }


def step_plans(served: Deployment, requests: int, target: str, keys: Keys) -> Iterator[tuple[str, Plan]]:
    """The whole draft step with our kernels, and what of it vLLM's kernels serve in plans too."""
    stock = dict.fromkeys(PARTS, STOCK)
    context, query = requests * served.query_length, requests * served.draft.num_speculative_tokens
    for provider, providers in ((CUTE, None), (STOCK, stock)):
        yield provider, context_plan(served, context, target, from_taps=True, providers=providers, keys=keys)
        yield provider, draft_plan(served, query, target, providers=providers, keys=keys)
    multiplier, cap = served.draft.output_multiplier, served.draft.final_logit_softcapping
    yield CUTE, markov_plan(served, requests, target, multiplier=multiplier, soft_cap=cap, keys=keys)


def check_plans(served: Deployment, requests: int, target: str, keys: Keys) -> Iterator[Plan]:
    """What is held against its references: both starts of the context chain, with RoPE and without where it may be."""
    context, query = requests * served.query_length, requests * served.draft.num_speculative_tokens
    for rope in (mode == "rope" for mode in served.draft.attention.position_modes):
        yield draft_plan(served, query, target, rope=rope, keys=keys)
        yield context_plan(served, context, target, rope=rope, keys=keys)
    yield context_plan(served, context, target, from_taps=True, keys=keys)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"draft-pack: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    keys, served = Keys(options.target), deployment(options.geometry, options.tp)
    found = [
        Made("bench", served, provider, plan)
        for requests in options.requests
        for provider, plan in step_plans(served, requests, options.target, keys)
    ]
    checked = [(served, requests) for requests in (options.requests[0], options.requests[-1])]
    checked += [(deployment("tiny", tp), requests) for tp in (1, 2) for requests in (1, 3, 8)]
    for each, requests in checked:
        found += [Made("check", each, CUTE, plan) for plan in check_plans(each, requests, options.target, keys)]
    contents = [to_bytes(each.plan) for each in found]
    files = {f"{PLANS}/{digest_in(content)}.json": content for content in contents}
    files |= files_of(_entries(found, options.target))
    listed = [each.listed(digest_in(content)) for each, content in zip(found, contents, strict=True)]
    manifest = {"format": 1, "target": options.target, "plans": listed}
    write(options.out, {**files, MANIFEST: json.dumps(manifest, indent=1).encode()})
    print(f"{options.out}: {len(found)} plans, {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


def _entries(found: Sequence[Made], target: str) -> list[Entry]:
    """What the plans launch, compiled where it is missing. Raises the first kernel's error."""
    needed: set[Key] = set().union(*(each.plan.keys() for each in found))
    served = {(each.served.backbone.name, each.served.tp): each.served for each in found}
    names = sorted({key.kernel for key in needed})
    asked = [made for each in served.values() for made in specializations(each, names)]
    return entries_of(needed, asked, target, from_environment())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.draft_pack", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar[.xz]")
    parser.add_argument("--target", choices=TARGETS, default="sm_90a")
    parser.add_argument("--geometry", default="muse_spark_open")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8])
    return parser


if __name__ == "__main__":
    sys.exit(main())
