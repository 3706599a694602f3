"""`python -m bench.decode_ranks_pack`: the plans and kernels that bin/bench-decode-ranks runs, in one tar.

For a TP group of any size, whether or not the whole model is served at it: with a slice of every expert and with whole
experts, exchanges fused and over NCCL, and of vLLM's kernels. In the environment of bin/make-decode-pack.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from bench import nccl_exchanges
from bench.decode_pack import entries_of, listed, slice_of
from bench.expert_parallel import PURPOSE, SLICES, WHOLE, whole_experts, with_whole_experts
from bench.make_pack import files_of, write
from bench.packed_cache import MANIFEST
from jitspark.building.build import wanted_for
from jitspark.cache.store import PLANS, Entry
from jitspark.errors import JitsparkError
from jitspark.geometry import Deployment, load_geometry
from jitspark.geometry import deployment as deployment_of
from jitspark.plans.backbone import decode_plan
from jitspark.plans.builder import Keys
from jitspark.plans.format import digest_in, to_bytes
from jitspark.plans.plan import CUTE, Plan
from jitspark.registry import specializations
from jitspark.runtime.parts import PARTS
from jitspark.settings import Settings, from_environment
from jitspark.target import TARGETS

PROVIDERS = {  # who serves which part
    CUTE: {},
    nccl_exchanges.NCCL: {"all_reduce": nccl_exchanges.NCCL},
    nccl_exchanges.STOCK: dict.fromkeys(PARTS, nccl_exchanges.STOCK),
}


def served_at(geometry: str, tp: int, layers: int | None) -> Deployment:
    """The deployment's first layers, at any TP size that its kernels divide by."""
    sizes = load_geometry(geometry).tp_sizes
    whole = msgspec.structs.replace(deployment_of(geometry, min(sizes)), tp=tp)
    return whole if layers in (None, whole.backbone.num_hidden_layers) else slice_of(whole, layers)


def step_plans(served: Deployment, rows: int, keys: Keys) -> Iterator[tuple[str, str, Plan]]:
    """(provider, experts, plan): NCCL beside our exchanges is measured with slices alone."""
    for provider, providers in PROVIDERS.items():
        plan = decode_plan(served, rows, keys.target, providers=providers, keys=keys)
        yield provider, SLICES, plan
        if provider != nccl_exchanges.NCCL:
            yield provider, WHOLE, with_whole_experts(plan, served.backbone.experts, keys)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"decode-ranks-pack: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    keys = Keys(options.target)
    served = served_at(options.geometry, options.tp, options.layers)
    found = [each for rows in options.m for each in step_plans(served, rows, keys)]
    settings = replace(from_environment(), **({"cache_dir": options.cache_dir} if options.cache_dir else {}))
    entries = build_entries(served, [plan for *_, plan in found], options.target, settings)
    files = {f"{PLANS}/{digest_in(content)}.json": content for content in (to_bytes(plan) for *_, plan in found)}
    plans = [{**listed(PURPOSE, served, provider, plan), "experts": experts} for provider, experts, plan in found]
    manifest = {"format": 1, "target": options.target, "plans": plans}
    write(options.out, {**files, **files_of(entries), MANIFEST: json.dumps(manifest, indent=1).encode()})
    print(f"{options.out}: {len(found)} plans, {len(entries)} entries, {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


def build_entries(served: Deployment, plans: Sequence[Plan], target: str, settings: Settings) -> list[Entry]:
    """The entries of all plans, and what follows NCCL's exchanges. Raises the first kernel's error."""
    unfused = [each for plan in plans for each in nccl_exchanges.all_unfused(plan)]
    whole = [each for plan in plans for each in whole_experts(served.backbone.experts, plan.rows).values()]
    needed = {key for plan in plans for key in plan.keys()}  # noqa: SIM118 - a plan's own method
    needed |= {item.key for item in wanted_for(unfused, [target])}
    asked = [*specializations(served), *unfused, *whole]
    return entries_of(needed, asked, target, settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.decode_ranks_pack", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar[.xz]")
    parser.add_argument("--target", choices=TARGETS, default="sm_90a")
    parser.add_argument("--geometry", default="muse_spark_open")
    parser.add_argument("--tp", type=int, required=True, help="ranks")
    parser.add_argument("--layers", type=int, help="the first so many (default: all)")
    parser.add_argument("--m", type=int, nargs="+", default=[8, 16, 32, 64], help="rows of the plans")
    parser.add_argument("--cache-dir", type=Path, help="where to compile into (default: the usual cache)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
