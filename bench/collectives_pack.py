"""`python -m bench.collectives_pack`: compile and pack what bin/bench-collectives needs, and nothing else.

On a machine that need not have a GPU, in the environment of bin/make-gpu-pack.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.collective_cases import cases, needed
from bench.make_pack import build_all, write_pack
from jitspark.building.build import wanted_for
from jitspark.errors import JitsparkError
from jitspark.settings import from_environment
from jitspark.target import TARGETS

ROWS = (8, 16, 32, 64)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"collectives-pack: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    asked = [each for size in options.world for each, _ in cases(size, ROWS, hidden_only=True)]
    made = list({each.title(): each for each in (*asked, *needed(asked))}.values())
    settings = replace(from_environment(), **({"cache_dir": options.cache_dir} if options.cache_dir else {}))
    entries = build_all(wanted_for(made, [options.target]), settings)
    manifest = {"format": 2, "target": options.target, "launches": [], "parts": [], "resources": {}}
    write_pack(options.out, entries, json.dumps(manifest).encode())
    print(f"{options.out}: {len(entries)} entries, {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.collectives_pack", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar")
    parser.add_argument("--world", type=int, nargs="+", default=[2], help="ranks (default: 2)")
    parser.add_argument("--target", choices=TARGETS, default="sm_90a")
    parser.add_argument("--cache-dir", type=Path, help="where to compile into (default: the usual cache)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
