"""How well cold processes share the compiling: 16 processes, 40 keys, a stub compiler that takes a known time.

`python bench/share_cache.py [RUNS]`; no GPU and no compiler. Prints one JSON object a run: wall seconds from the moment
all processes are told to go until the last entry is published, over the least possible, keys x time / slots.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from stub_cache import CacheUser, compiles, make_templates, wait_until

PROCESSES, KEYS, SECONDS, SLOTS = 16, 40, 0.25, 2


def run(templates: Path, folder: Path) -> dict[str, float | int]:
    task = {"root": str(folder / "cache"), "folder": str(folder), "templates": str(templates), "count": KEYS}
    task |= {"seconds": SECONDS, "slots": SLOTS, "log": str(folder / "log"), "load": False}
    users = [CacheUser(**task) for _ in range(PROCESSES)]
    for user in users:
        user.wait_ready()
    started = time.monotonic()
    for user in users:
        user.go()
    published = folder / "cache" / "artifacts-v1"
    wait_until(lambda: sum(1 for _ in published.rglob("record.json")) == KEYS, timeout=120.0)
    wall = time.monotonic() - started
    reports = [user.report() for user in users]
    done = time.monotonic() - started
    least = KEYS * SECONDS / SLOTS
    return {
        "processes": PROCESSES,
        "keys": KEYS,
        "slots": SLOTS,
        "compile_seconds": SECONDS,
        "cores": len(os.sched_getaffinity(0)),
        "compiles": len(compiles(folder / "log")),
        "wall_seconds": round(wall, 2),
        "wall_over_least": round(wall / least, 3),
        "all_done_over_least": round(done / least, 3),
        "slowest_process_seconds": round(max(report["seconds"] for report in reports), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", metavar="RUNS", type=int, nargs="?", default=1)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as base:
        (Path(base) / "templates").mkdir()
        templates = make_templates(Path(base) / "templates")
        for number in range(runs):
            folder = Path(base) / str(number)
            folder.mkdir()
            print(json.dumps(run(templates, folder)))


if __name__ == "__main__":
    main()
