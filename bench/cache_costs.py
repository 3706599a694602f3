"""What the cache's own work costs: verifying, a strict check of 64 keys, taking over from a killed holder.

`python bench/cache_costs.py`; no GPU and no compiler. Prints one JSON object of medians; CPU times are of one core, so
that a busy machine does not count.
"""

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from stub_cache import (
    CacheUser,
    artifact_of,
    compiles,
    fill,
    lookup_in,
    make_templates,
    record_of,
    settings_for,
    wait_until,
    wanted,
)

from jitspark.building.build import build
from jitspark.cache.record import check_artifact
from jitspark.cache.store import put


def milliseconds(action: Callable[[], object], runs: int = 30) -> float:
    """The median of one call's CPU time."""
    times = []
    for _ in range(runs):
        started = time.process_time_ns()
        action()
        times.append((time.process_time_ns() - started) / 1e6)
    return round(statistics.median(times), 3)


def verifying(folder: Path, templates: Path) -> dict[str, float]:
    """Hashing 64 KB, and all of reading and checking an entry of that size."""
    item = wanted(1, start=1000)[0]
    content = artifact_of(item, templates).ljust(65536, b"\0")
    record = record_of(item, content)
    entry = put(fill(folder / "cache", wanted(1), templates)[0].layer, item.key, record, content)
    lookup = lookup_in(entry.layer)
    assert lookup.find(item.key, whole=True) is not None
    return {
        "digest_of_64_kb_ms": milliseconds(lambda: check_artifact(record, content, "here")),
        "lookup_of_64_kb_entry_ms": milliseconds(lambda: lookup.find(item.key, whole=True)),
    }


def strict(folder: Path, templates: Path) -> dict[str, float]:
    """All keys of a plan found and verified, compiling forbidden."""
    items = wanted(64)
    layer = fill(folder / "cache", items, templates)[0].layer
    settings = dataclasses.replace(settings_for(folder / "cache", folder), compile="never")
    return {"strict_check_of_64_keys_ms": milliseconds(lambda: build(items, lookup_in(layer), settings))}


def taking_over(folder: Path, templates: Path) -> float:
    """Milliseconds from a holder's kill to the start of the waiter's compile, its child's start included."""
    task = {"root": str(folder / "cache"), "folder": str(folder), "templates": str(templates), "count": 1}
    task |= {"log": str(folder / "log"), "load": False}
    holder, waiter = CacheUser(**task, seconds=60.0), CacheUser(**task)
    for user in (holder, waiter):
        user.wait_ready()
    holder.go()
    wait_until(lambda: compiles(folder / "log"))
    waiter.go()
    time.sleep(0.5)
    killed = time.monotonic()
    holder.process.kill()
    wait_until(lambda: len(compiles(folder / "log")) == 2)
    took = time.monotonic() - killed
    holder.kill()
    waiter.report()
    return took * 1000


def main() -> None:
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args()
    with tempfile.TemporaryDirectory() as base:
        folders = [Path(base) / str(number) for number in range(12)]
        for folder in folders:
            folder.mkdir()
        templates = make_templates(folders[0])
        costs = {"cores": float(len(os.sched_getaffinity(0))), **verifying(folders[1], templates)}
        costs |= strict(folders[2], templates)
        taken = [taking_over(folder, templates) for folder in folders[3:]]
        print(json.dumps({**costs, "take_over_ms": round(statistics.median(taken)), "slowest_ms": round(max(taken))}))


if __name__ == "__main__":
    main()
