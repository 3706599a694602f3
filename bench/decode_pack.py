"""`bin/make-decode-pack`: the plans and kernels that bin/bench-decode and bin/check-plans run, in one tar.

A plan lies in plans-v1 under its digest; the manifest says which plan is for what.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from bench.make_pack import files_of, write
from bench.packed_cache import MANIFEST
from jitspark.building.build import build, wanted_for
from jitspark.cache.lookup import Lookup
from jitspark.cache.store import PLANS, Entry
from jitspark.errors import JitsparkError
from jitspark.geometry import Deployment, deployment
from jitspark.key import Key
from jitspark.plans.backbone import decode_plan, logits_plan
from jitspark.plans.builder import Keys
from jitspark.plans.format import digest_in, to_bytes
from jitspark.plans.plan import CUTE, Plan
from jitspark.registry import specializations
from jitspark.runtime.parts import PARTS, STOCK
from jitspark.settings import Settings, from_environment
from jitspark.spec import Specialization
from jitspark.target import TARGETS

SLICE = 4  # layers: one with BF16 experts, three with NVFP4, one of them without a window; the last is tapped


def slice_of(served: Deployment, layers: int) -> Deployment:
    """The first layers of a deployment, the last of them tapped."""
    backbone = served.backbone

    def within(chosen: Sequence[int]) -> tuple[int, ...]:
        return tuple(layer for layer in chosen if layer < layers)

    shorter = msgspec.structs.replace(
        backbone,
        num_hidden_layers=layers,
        full_attention_layers=within(backbone.full_attention_layers),
        nope_layers=within(backbone.nope_layers),
        tap_layers=(layers - 1,),
        experts=msgspec.structs.replace(backbone.experts, bf16_layers=within(backbone.experts.bf16_layers)),
    )
    return msgspec.structs.replace(served, backbone=shorter)


def step_plans(served: Deployment, rows: int, target: str, keys: Keys) -> Iterator[tuple[str, Plan]]:
    """The decode plan with our kernels and with vLLM's, and the logits' plans."""
    stock = dict.fromkeys(PARTS, STOCK)
    for provider, providers in ((CUTE, None), (STOCK, stock)):
        yield provider, decode_plan(served, rows, target, providers=providers, keys=keys)
        yield provider, logits_plan(served, rows, target, providers=providers, keys=keys)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"decode-pack: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    keys = Keys(options.target)
    whole = deployment(options.geometry, options.tp)
    found: list[tuple[str, Deployment, str, Plan]] = []
    for rows in options.m:
        found += [("bench", whole, provider, plan) for provider, plan in step_plans(whole, rows, options.target, keys)]
    for served, rows in (*_checked(options), *(() if options.no_slice else ((slice_of(whole, SLICE), 8),))):
        # vLLM's NVFP4 experts read the same bytes as other weights, and its ranks exchange in other steps
        alike = served.tp == 1 and served.backbone.experts.weight_dtype == "bfloat16"
        made = step_plans(served, rows, options.target, keys)
        found += [("check", served, provider, plan) for provider, plan in made if provider == CUTE or alike]
    settings = replace(from_environment(), **({"cache_dir": options.cache_dir} if options.cache_dir else {}))
    entries = build_entries(found, options.target, settings)
    files = {f"{PLANS}/{digest_in(content)}.json": content for content in (to_bytes(plan) for *_, plan in found)}
    manifest = {"format": 1, "target": options.target, "plans": [listed(*each) for each in found]}
    files |= files_of(entries)
    write(options.out, {**files, MANIFEST: json.dumps(manifest, indent=1).encode()})
    print(f"{options.out}: {len(found)} plans, {len(entries)} entries, {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


def build_entries(found: Sequence[tuple[str, Deployment, str, Plan]], target: str, settings: Settings) -> list[Entry]:
    """The entries of all plans, compiled where they are missing. Raises the first kernel's error."""
    needed: set[Key] = set().union(*(plan.keys() for *_, plan in found))
    asked = [each for served in _deployments(found) for each in specializations(served)]
    return entries_of(needed, asked, target, settings)


def entries_of(needed: set[Key], asked: Sequence[Specialization], target: str, settings: Settings) -> list[Entry]:
    """The entries of the keys that plans need, all among `asked`. Raises the first kernel's error."""
    wanted = {item.key: item for item in wanted_for(asked, [target]) if item.key in needed}
    assert wanted.keys() == needed, "a plan asks for what no specialization is"
    report = build(list(wanted.values()), Lookup(settings), settings)
    for error in report.failed.values():
        raise error
    return list(report.entries.values())


def _checked(options: argparse.Namespace) -> Iterator[tuple[Deployment, int]]:
    for name, tp in (("tiny", 1), ("tiny_swa", 1), ("tiny_swa", 2)):
        for rows in (8, 24):
            if not options.no_tiny:
                yield deployment(name, tp), rows


def _deployments(found: Sequence[tuple[str, Deployment, str, Plan]]) -> list[Deployment]:
    return list(
        {
            (served.backbone.name, served.backbone.num_hidden_layers, served.tp): served for _, served, _, _ in found
        }.values()
    )


def listed(purpose: str, served: Deployment, provider: str, plan: Plan) -> dict[str, object]:
    return {
        "purpose": purpose,
        "geometry": served.backbone.name,
        "layers": served.backbone.num_hidden_layers,
        "num_experts": served.backbone.experts.num_local_experts,
        "tp": plan.tp,
        "rows": plan.rows,
        "stage": plan.stage.value,
        "provider": provider,
        "plan": digest_in(to_bytes(plan)),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bin/make-decode-pack", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar[.xz]")
    parser.add_argument("--target", choices=TARGETS, default="sm_90a")
    parser.add_argument("--geometry", default="muse_spark_open")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--m", type=int, nargs="+", default=[8, 16, 32, 64], help="rows of the measured plans")
    parser.add_argument("--no-tiny", action="store_true", help="no plans of the tiny geometries")
    parser.add_argument("--no-slice", action="store_true", help="no plan of the geometry's first layers")
    parser.add_argument("--cache-dir", type=Path, help="where to compile into (default: the usual cache)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
