"""How long the verbs that look at and carry a cache take to start: `python -m bench.cli_start`, on a small cache.

Each run is a process of its own; processor time is what others on the machine change least. A cache of 20 stub entries,
so that the verb's own work is small beside its start; `--plans` adds two plans, which then have to be read.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import cpu

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 0.150  # seconds of processor time
RUNS = 15
PROGRAMS = ("jitspark", "cache_tools")


def main() -> int:
    options = _parser().parse_args()
    about = cpu.description()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    with tempfile.TemporaryDirectory(prefix="jitspark-start-") as folder:
        recipe = _fill(Path(folder), plans=options.plans)
        every = [(program, words) for program in PROGRAMS for words in _verbs(Path(folder), recipe)]
        rows = [(program, words[0], *_measured(program, words, Path(folder))) for program, words in every]
    print(f"Python {about['python']}, {about['cores']} cores, load {about['load_average'][0]}; {RUNS} runs each")
    print(f"{'program':<12} {'verb':<8} {'processor ms, least':>20} {'median':>7} {'wall ms, median':>16}")
    for program, verb, least, median, wall in rows:
        print(f"{program:<12} {verb:<8} {1000 * least:>20.0f} {1000 * median:>7.0f} {1000 * wall:>16.0f}")
    slow = [f"{program} {verb}" for program, verb, least, *_ in rows if least > LIMIT and not verb.startswith("-")]
    print(json.dumps({"limit_ms": 1000 * LIMIT, "over": slow}))
    if options.json is not None:
        names = ("program", "verb", "least_s", "median_s", "wall_s")
        found = [dict(zip(names, row, strict=True)) for row in rows]
        options.json.write_text(json.dumps({"about": about, "runs": RUNS, "verbs": found}, indent=1) + "\n")
    return 1 if slow else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.cli_start", description=__doc__.partition("\n")[0])
    parser.add_argument("--plans", action="store_true", help="a cache with two plans, which verbs then have to read")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there, too")
    return parser


def _fill(folder: Path, *, plans: bool) -> str:
    import stub_cache
    from pack_fixtures import step_of, store_plan

    templates = stub_cache.make_templates(folder)
    entries = stub_cache.fill(folder / "cache", stub_cache.wanted(20), templates, stub_cache.other_toolchain())
    for rows in (8, 16) if plans else ():
        store_plan(folder / "cache", step_of(entries, rows))
    return str(entries[0].key.recipe[:16])


def _verbs(folder: Path, recipe: str) -> Iterator[list[str]]:
    pack, cache = str(folder / "x.tar.zst"), str(folder / "cache")
    yield ["--help"]
    yield from (["ls"], ["explain", recipe], ["stats"], ["verify"], ["prune", "--dry-run"], ["diff", cache, cache])
    yield ["pack", pack]
    yield ["unpack", pack, "--allow-unsigned"]
    yield ["merge", f"{pack}.2", pack, "--allow-unsigned"]


def _measured(program: str, words: list[str], folder: Path) -> tuple[float, float, float]:
    """Least and median processor seconds, and median wall seconds, of `RUNS` processes behind a first one."""
    environment = {
        **os.environ,
        "JITSPARK_CACHE_DIR": str(folder / "cache"),
        "XDG_RUNTIME_DIR": str(folder),
        "PYTHONPATH": str(ROOT),
    }
    used, walls = [], []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", program, *words], env=environment, stdout=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{program} {' '.join(words)}: status {process.returncode}")
        walls.append(time.perf_counter() - began)
        used.append(usage.ru_utime + usage.ru_stime)
    return min(used[1:]), statistics.median(used[1:]), statistics.median(walls[1:])


if __name__ == "__main__":
    sys.exit(main())
