"""`bin/bench-load`: how long a process without compiler and torch takes to load 64 kernels, and its peak memory.

Each measurement is a fresh process; quack-kernels' cache hit, where it is installed, is measured in between, in the
same run. The first process of each kind is not counted: it fills the page cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import cpu
from jitspark.cache.lookup import open_roots
from jitspark.cache.store import keys_in, read_entry
from jitspark.key import Key
from jitspark.settings import from_environment
from jitspark.toolchain import runtime_library

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).resolve().parent / "results"
KERNELS = 64
LIMITS = {"total_ms": 100.0, "peak_rss_mb": 60.0}
QUACK_TARGET = {"QUACK_ARCH": "90", "CUTE_DSL_ARCH": "sm_90a"}
# What the measured processes may see: nothing of this one's environment that could help or hinder them.
PASSED = ("PATH", "HOME", "LD_LIBRARY_PATH", "TMPDIR")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    keys = _keys()
    if len(keys) < KERNELS:
        print(
            f"bench-load: {len(keys)} entries in the cache, {KERNELS} needed: run `jitspark warm` first",
            file=sys.stderr,
        )
        return 7
    with tempfile.TemporaryDirectory(prefix="jitspark-bench-") as folder:
        ours = _ours(options.python, keys, Path(folder))
        quack = _quack(options.quack, Path(folder)) if options.quack is not None else None
        found = _measure({"jitspark": ours, **({} if quack is None else {"quack": quack})}, options.runs)
    result = {"about": _about(options.runs, keys), "limits": LIMITS, **found}
    _print(result)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"load_{result['about']['date']}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
    return 0 if all(found["jitspark"][name]["median"] <= limit for name, limit in LIMITS.items()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bin/bench-load", description="Milliseconds and memory that loading 64 kernels takes."
    )
    parser.add_argument("--python", required=True, help="the interpreter of an environment with apache-tvm-ffi alone")
    parser.add_argument("--quack", help="the interpreter of an environment with quack-kernels, to measure beside")
    parser.add_argument("--runs", type=int, default=25, help="processes of each kind")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser


def _keys() -> list[Key]:
    """The first 64 keys of the configured cache whose artifacts differ: equal ones are loaded once."""
    artifacts: dict[str, Key] = {}
    for layer in open_roots(from_environment()).layers:
        for key, toolchain in keys_in(layer):
            entry = read_entry(layer, key, toolchain)
            if entry is not None:
                artifacts.setdefault(entry.record.sha256, key)
    return sorted(set(artifacts.values()))[:KERNELS]


def _ours(python: str, keys: Sequence[Key], folder: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a load."""
    path = folder / "keys.json"
    path.write_text(json.dumps([(key.target, key.host, key.kernel, key.recipe) for key in keys]))
    return [python, "-P", str(ROOT / "bench/load_once.py"), str(path)], environment()


def environment() -> dict[str, str]:
    """What a measured process sees: this one's cache and runtime library, and that it must not compile."""
    settings = from_environment()
    library = settings.runtime_library or (runtime_library() or (None,))[0]
    assert library is not None, "no runtime library installed here"
    own = {
        "PYTHONPATH": str(ROOT),
        "JITSPARK_CACHE_DIR": str(settings.cache_dir),
        "JITSPARK_CACHE_PATH": os.pathsep.join(map(str, settings.cache_path)),
        "JITSPARK_RUNTIME_LIBRARY": str(library),
        "JITSPARK_COMPILE": "never",
    }
    return {**_passed(), **own}


def _quack(python: str, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a quack-kernels load, after its cache has been filled."""
    command = [python, "-P", str(ROOT / "bench/quack_once.py"), str(KERNELS)]
    environment = {**_passed(), **QUACK_TARGET, "QUACK_CACHE_DIR": str(folder / "quack")}
    filled = _run(command, environment)
    assert filled["misses"] == KERNELS
    return command, environment


def _passed() -> dict[str, str]:
    return {name: os.environ[name] for name in PASSED if name in os.environ}


def _measure(kinds: Mapping[str, tuple[list[str], dict[str, str]]], runs: int) -> dict[str, Any]:
    """Median, least and most of what each kind reports; the kinds take turns."""
    reports: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for number in range(runs + 1):
        for name, (command, environment) in kinds.items():
            report = _run(command, environment)
            assert not report.get("foreign") and not report.get("misses"), report
            if number:
                reports[name].append(report)
    return {name: _summary(each) for name, each in reports.items()}


def _run(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode != 0:
        raise SystemExit(f"bench-load: {' '.join(command)} ended with {answer.returncode}\n{answer.stderr}")
    report: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return report


def _summary(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = [name for name in reports[0] if name.endswith(("_ms", "_mb"))]
    values = {name: [float(report[name]) for report in reports] for name in names}
    return {name: _spread(each) for name, each in values.items()}


def _spread(values: Sequence[float]) -> dict[str, float]:
    spread = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 2) for name, value in spread.items()}


def _about(runs: int, keys: Sequence[Key]) -> dict[str, Any]:
    return {
        **cpu.description(),
        "nice": os.nice(0),
        "runs": runs,
        "kernels": {name: sum(key.kernel == name for key in keys) for name in sorted({key.kernel for key in keys})},
    }


def _print(result: Mapping[str, Any]) -> None:
    about = result["about"]
    print(f"{KERNELS} kernels, {about['runs']} processes each, {about['cpu']}, load average {about['load_average'][0]}")
    for kind in ("jitspark", "quack"):
        if kind not in result:
            print(f"{kind}: not run")
            continue
        parts = (f"{name} {each['median']} ({each['least']} to {each['most']})" for name, each in result[kind].items())
        print(f"{kind}: {', '.join(parts)}")
    for name, limit in LIMITS.items():
        median = result["jitspark"][name]["median"]
        print(f"{name}: median {median}, limit {limit}: {'PASS' if median <= limit else 'FAIL'}")


if __name__ == "__main__":
    sys.exit(main())
