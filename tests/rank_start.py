"""Ranks as processes that prepare their kernels together, from one cold cache and with a stub compiler.

    python tests/rank_start.py TASK.json RANK

TASK: folder (the cache, the locks and the meeting place of the ranks), ranks, templates, keys, seconds (of a compile),
on_error, and fault: {"rank", "kind": "missing" | "bug" | "death" | "other plans", "after": seconds}. Prints a line of
JSON: what the rank has in the end, the error, and seconds.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import torch.distributed as dist  # noqa: E402
from stub_cache import settings_for, stub_command, wanted  # noqa: E402

from jitspark.building.build import build_and_load, missing_entries  # noqa: E402
from jitspark.cache.loader import Loader  # noqa: E402
from jitspark.cache.lookup import Lookup  # noqa: E402
from jitspark.errors import JitsparkError  # noqa: E402
from jitspark.runtime.prepared import on_all_ranks  # noqa: E402
from jitspark.runtime.ranks import RankGroup  # noqa: E402


def join(task, rank):
    folder = Path(task["folder"])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=task["ranks"],
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    dist.barrier()  # a rank that dies before the others are connected would end them outside of what is tested
    return RankGroup(rank, task["ranks"], dist.group.WORLD, dist.group.WORLD, patience=30.0)


def fault_of(task, rank):
    fault = task.get("fault") or {}
    return (fault.get("kind"), fault.get("after", 0.0)) if fault.get("rank") == rank else (None, 0.0)


def work(task, rank, tell):
    kind, after = fault_of(task, rank)
    if kind is not None:
        time.sleep(after)
    items = wanted(task["keys"])
    if kind == "missing":
        raise missing_entries([items[0].key])
    if kind == "bug":
        raise RuntimeError("something nobody has thought of")
    if kind == "death":
        os._exit(9)
    folder = Path(task["folder"])
    settings = settings_for(folder / "cache", folder)
    command = stub_command(Path(task["templates"]), folder / "compiles.log", task["seconds"])
    kernels = build_and_load(items, Lookup(settings), Loader(settings), settings, on_event=tell, command=command)
    return SimpleNamespace(digest="others" if kind == "other plans" else "these", kernels=kernels)


def main():
    task, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    ranks = join(task, rank)
    started = time.monotonic()
    said = {}
    try:
        made = on_all_ranks(lambda tell: work(task, rank, tell), ranks, task.get("on_error", "raise"))
        said["has"] = "stock" if made is None else len(made.kernels)
    except (JitsparkError, RuntimeError) as error:
        said |= {"error": type(error).__name__, "text": str(error)}
    sys.stdout.write(json.dumps({**said, "seconds": time.monotonic() - started}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still wait for a rank that has gone


if __name__ == "__main__":
    main()
