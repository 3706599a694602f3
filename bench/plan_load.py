"""How long a process without compiler, torch and geometry library takes to load all plans of a deployment.

`python -m bench.plan_load --python PYTHON [--tp 8] [--target sm_90a]`, on a cache that `jitspark warm` has filled.
Each measurement is a fresh process; the first one fills the page cache and is not counted.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import cpu
from bench.load import RESULTS, ROOT, _spread, environment

LIMIT_MS = 150.0  # for plans, records and kernels, after imports


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    command = [options.python, "-P", str(ROOT / "bench/plan_load_once.py")]
    command += [options.geometry, str(options.tp), options.target]
    reports = [_run(command) for _ in range(options.runs + 1)][1:]
    assert not any(each["foreign"] for each in reports), reports[0]["foreign"]
    times = {name: _spread([each[name] for each in reports]) for name in reports[0] if name.endswith("_ms")}
    counts = {name: reports[0][name] for name in ("plans", "decode_plans", "launches", "kernels")}
    result = {"about": _about(options), **counts, "limit_ms": LIMIT_MS, **times}
    for name, value in result.items():
        print(f"{name}: {value}")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"plan_load_{result['about']['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
    return 0 if times["total_ms"]["median"] <= LIMIT_MS else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Milliseconds that loading all plans of a deployment takes.")
    parser.add_argument("--python", required=True, help="the interpreter of an environment with apache-tvm-ffi alone")
    parser.add_argument("--geometry", default="muse_spark_open")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--runs", type=int, default=15, help="processes")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def _run(command: Sequence[str]) -> dict[str, Any]:
    answer = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise SystemExit(f"bench.plan_load: {' '.join(command)} ended with {answer.returncode}\n{answer.stderr}")
    report: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return report


def _about(options: argparse.Namespace) -> dict[str, Any]:
    return {
        **cpu.description(),
        "deployment": f"{options.geometry} at TP {options.tp} on {options.target}",
        "runs": options.runs,
    }


if __name__ == "__main__":
    sys.exit(main())
