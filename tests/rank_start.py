"""Ranks as processes that prepare their kernels together, from one cold cache and with a stub compiler.

    python tests/rank_start.py TASK.json

TASK: folder (the cache, the locks and the meeting place of the ranks), ranks, templates, keys, seconds (of a compile),
on_error, and fault: {"rank", "kind": "missing" | "bug" | "death" | "other plans", "amid_compiles"}. Each rank prints
a line of JSON: what it has in the end, or the error.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import rank_processes  # noqa: E402
import torch  # noqa: E402
from stub_cache import compiles, settings_for, stub_command, wait_until, wanted  # noqa: E402

from jitspark.building.build import build_and_load, missing_entries  # noqa: E402
from jitspark.cache.loader import Loader  # noqa: E402
from jitspark.cache.lookup import Lookup  # noqa: E402
from jitspark.errors import JitsparkError  # noqa: E402
from jitspark.runtime.prepared import on_all_ranks  # noqa: E402


def fault_of(task, rank):
    """How this rank fails; it does when some rank compiles, if it is to fail amid compiles."""
    fault = task.get("fault") or {}
    if fault.get("rank") != rank:
        return None
    if fault.get("amid_compiles"):
        wait_until(lambda: compiles(Path(task["folder"]) / "compiles.log"))
    return fault["kind"]


def work(task, rank, tell):
    kind = fault_of(task, rank)
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


def told(task, rank):
    """Say what a rank ends with. It leaves at once: gloo's threads may still wait for one that has gone."""
    ranks = rank_processes.join(task["folder"], rank, task["ranks"])
    said = {"rank": rank}
    try:
        made = on_all_ranks(lambda tell: work(task, rank, tell), ranks, task.get("on_error", "raise"))
        said["has"] = "stock" if made is None else len(made.kernels)
    except (JitsparkError, RuntimeError) as error:
        said |= {"error": type(error).__name__, "text": str(error)}
    os.write(1, (json.dumps(said) + "\n").encode())


def main():
    task = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    pids = [rank_processes.forked(lambda rank=rank: told(task, rank)) for rank in range(task["ranks"])]
    for pid in pids:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
