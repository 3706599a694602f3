"""How the ranks of a node start together: `python -m bench.rank_starts --python PYTHON --tp 8`. No GPU is needed.

Cold: as many processes as ranks, told to go at one time, prepare all plans and kernels of the deployment from an empty
cache with the real compiler, each kernel compiled once among them. Then `jitspark pack --format dir` makes a layer of
that cache, which is made read-only; warm: as many fresh processes, without a compiler, load everything from it at once.
Runs in the environment of bin/make-gpu-pack; PYTHON is an interpreter with apache-tvm-ffi alone, for the warm start.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import cpu
from bench.load import RESULTS, ROOT, environment

PASSED = ("PATH", "LD_LIBRARY_PATH", "HOME")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    ranks = options.ranks or options.tp
    with tempfile.TemporaryDirectory(prefix="jitspark-starts-", dir=options.folder) as name:
        folder = Path(name)
        cold = summary(*_together(_cold(folder, options), ranks))
        layer = _packed(folder, options)
        warm = _warm(layer, ranks, options)
    result = {"about": _about(options, ranks), "cold": cold, "warm": warm}
    print(json.dumps(result, indent=1))
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"starts_tp{options.tp}_{result['about']['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
    return 0 if cold["compiled_twice"] == 0 else 1


def summary(reports: Sequence[Mapping[str, Any]], seconds: float) -> dict[str, Any]:
    """What cold ranks did together: `seconds` until the last one was ready."""
    compiled = [sum(report["compiled"].values()) for report in reports]
    keys = [key for report in reports for key in report["compiled"]]
    return {
        "seconds": round(seconds, 1),
        "ready_after_s": [round(report["seconds"], 1) for report in reports],
        "kernels": reports[0]["kernels"],
        "plans": reports[0]["plans"],
        "compiles": len(keys),
        "compiled_twice": len(keys) - len(set(keys)),
        "compiles_of_ranks": [len(report["compiled"]) for report in reports],
        "compiler_seconds": round(sum(compiled), 1),
    }


def _together(start: tuple[list[str], dict[str, str]], ranks: int) -> tuple[list[dict[str, Any]], float]:
    """Every process' report, and seconds from the word to go until the last one has reported."""
    command, own = start
    made = [
        subprocess.Popen(command, env=own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(ranks)
    ]
    for process in made:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", command
    began = time.perf_counter()
    for process in made:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate()[0] for process in made]
    seconds = time.perf_counter() - began
    if any(process.returncode for process in made):
        raise SystemExit(f"rank-starts: {' '.join(command)} ended with {[each.returncode for each in made]}")
    return [json.loads(answer.splitlines()[-1]) for answer in answers], seconds


def _cold(folder: Path, options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    command = [sys.executable, "-P", str(ROOT / "bench/rank_starts_once.py")]
    return [*command, options.geometry, str(options.tp), options.target], _own(folder)


def _own(folder: Path) -> dict[str, str]:
    """An environment with a cache and locks of this run's own."""
    (folder / "locks").mkdir(exist_ok=True)
    passed = {name: os.environ[name] for name in PASSED if name in os.environ}
    return {
        **passed,
        "PYTHONPATH": str(ROOT),
        "JITSPARK_CACHE_DIR": str(folder / "cache"),
        "XDG_RUNTIME_DIR": str(folder / "locks"),
    }


def _packed(folder: Path, options: argparse.Namespace) -> Path:
    """A layer of all that the deployment needs, read-only, as an image has it."""
    layer = folder / "layer"
    chosen = ["--geometry", options.geometry, "--tp", str(options.tp), "--target", options.target]
    command = [sys.executable, "-P", "-m", "jitspark", "pack", str(layer), *chosen, "--format", "dir"]
    subprocess.run(command, env=_own(folder), check=True, stdout=sys.stderr)
    for path in (layer, *layer.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)
    return layer


def _warm(layer: Path, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of each rank: plans, records and kernels. A first round, which fills the page cache, is dropped."""
    command = [options.python, "-P", str(ROOT / "bench/plan_load_once.py")]
    command += [options.geometry, str(options.tp), options.target]
    own = {**environment(), "JITSPARK_CACHE_DIR": "", "JITSPARK_CACHE_PATH": str(layer)}
    rounds = []
    for _ in range(options.rounds + 1):
        made = [subprocess.Popen(command, env=own, stdout=subprocess.PIPE, text=True) for _ in range(ranks)]
        rounds.append([json.loads(process.communicate()[0].splitlines()[-1]) for process in made])
    times = sorted(report["total_ms"] for reports in rounds[1:] for report in reports)
    some = rounds[0][0]
    return {
        "kernels": some["kernels"],
        "plans": some["plans"],
        "rounds": options.rounds,
        "median_ms": round(times[len(times) // 2], 1),
        "slowest_rank_ms": round(max(times), 1),
        "processor_ms": round(max(report["total_processor_ms"] for each in rounds[1:] for report in each), 1),
    }


def _about(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    return {
        "deployment": f"{options.geometry} at TP {options.tp} on {options.target}",
        "ranks": ranks,
        **cpu.description(),
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.rank_starts", description=__doc__.partition("\n")[0])
    parser.add_argument("--python", required=True, help="an interpreter with apache-tvm-ffi alone, for the warm start")
    parser.add_argument("--geometry", default="muse_spark_open")
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--ranks", type=int, help="processes (default: as many as the TP size)")
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--rounds", type=int, default=3, help="warm starts (default: 3)")
    parser.add_argument("--folder", type=Path, help="where the cache of this run lies (default: the usual one)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
