"""`python -m bench.ranks_pack`: plans and kernels of steps of a TP group, for bench.check_ranks and bench.rank_silence.

Decode steps of the tiny geometry, and of the first layers of the real one at the TP size asked for, whether or not the
whole model is served at it; the tiny draft's sampling loop. In the environment of bin/make-decode-pack.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from bench import decode_pack
from bench.make_pack import files_of, write
from bench.packed_cache import MANIFEST
from jitspark.cache.store import PLANS
from jitspark.errors import JitsparkError
from jitspark.geometry import DEFAULT_GEOMETRY, deployment
from jitspark.plans.backbone import decode_plan
from jitspark.plans.builder import Keys
from jitspark.plans.format import digest_in, to_bytes
from jitspark.plans.markov import markov_plan
from jitspark.plans.plan import CUTE
from jitspark.settings import from_environment
from jitspark.target import TARGETS

REQUESTS = 2  # of the sampling loop


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"ranks-pack: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    real = deployment(DEFAULT_GEOMETRY, 8)
    whole = msgspec.structs.replace(real, tp=options.tp)
    asked = [(deployment("tiny_swa", options.tp), 8), (decode_pack.slice_of(whole, decode_pack.SLICE), 8)]
    keys = Keys(options.target)
    found = [("ranks", served, CUTE, decode_plan(served, rows, options.target, keys=keys)) for served, rows in asked]
    tiny, _ = asked[0]
    loop = markov_plan(tiny, REQUESTS, options.target, multiplier=1.0, soft_cap=20.0, keys=keys)
    found.append(("sampling", tiny, CUTE, loop))
    settings = replace(from_environment(), **({"cache_dir": options.cache_dir} if options.cache_dir else {}))
    entries = decode_pack.build_entries(found, options.target, settings)
    files = {f"{PLANS}/{digest_in(content)}.json": content for content in (to_bytes(plan) for *_, plan in found)}
    listed = [decode_pack.listed(*each) for each in found]
    files |= files_of(entries)
    manifest = {"format": 1, "target": options.target, "plans": listed}
    write(options.out, {**files, MANIFEST: json.dumps(manifest, indent=1).encode()})
    print(f"{options.out}: {len(found)} plans, {len(entries)} entries, {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.ranks_pack", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar")
    parser.add_argument("--tp", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--target", choices=TARGETS, default="sm_90a")
    parser.add_argument("--cache-dir", type=Path, help="where to compile into (default: the usual cache)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
