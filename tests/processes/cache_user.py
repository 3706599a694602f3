"""A process that shares a cache: `cache_user.py TASK`, with the task as JSON.

Says "ready" when everything is imported, waits for a line, builds (and loads) the keys, and prints one JSON report.
Events go as they come to the file that `events` names.
"""

import json
import logging
import sys
import time
from pathlib import Path
from types import SimpleNamespace

sys.modules["torch"] = None  # apache-tvm-ffi would import it, for a second
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import filelock  # noqa: E402, F401 - part of being ready
from stub_cache import TARGET, number_of, other_toolchain, settings_for, stub_command, wanted  # noqa: E402

from jitspark.building import build as build_module  # noqa: E402
from jitspark.building import compiler_child, share  # noqa: E402
from jitspark.building.seats import Seats  # noqa: E402
from jitspark.cache import lock  # noqa: E402
from jitspark.cache.loader import Loader  # noqa: E402
from jitspark.cache.lookup import Lookup  # noqa: E402
from jitspark.errors import JitsparkError  # noqa: E402
from jitspark.toolchain import own_toolchain  # noqa: E402


def settings_of(task):
    root = Path(task["root"]) if task["root"] else None
    changes = {"cache_path": tuple(Path(p) for p in task.get("read_only", ())), "compile": task.get("compile", "auto")}
    changes |= {"compile_slots": task.get("slots", 2), "toolchain": task.get("accept", "any")}
    return settings_for(root, Path(task["folder"]), **changes)


def without_locks():
    lock.Lock.try_acquire = lambda _self, _what: True
    lock.Lock.release = lambda _self: None


def count_waits():
    """A clock for the building loop that shows how long it has asked to wait, whatever the machine took for it."""
    now, answered = 0.0, Seats.answered

    def counted(seats, seconds):
        nonlocal now
        now += seconds
        return answered(seats, seconds / 10)

    Seats.answered = counted
    share.time = compiler_child.time = SimpleNamespace(monotonic=lambda: now, time=time.time)
    return share.time.monotonic


def numbers(kernels):
    return [kernel.function() for kernel in kernels]


def run(task, items, settings, command, on_event):
    started = time.monotonic()
    lookup = Lookup(settings, toolchain=other_toolchain(task["toolchain"]) if task.get("toolchain") else None)
    report = build_module.build(items, lookup, settings, on_event=on_event, command=command)
    kernels = []
    if task.get("load", True) and not report.failed:
        kernels = Loader(settings).load([report.entries[item.key] for item in items])
        got, wanted_numbers = numbers(kernels), [number_of(item) for item in items]
        assert got == wanted_numbers, f"wrong kernels: {got} for {wanted_numbers}"
    if task.get("ledger"):
        build_module.note_uses(report, lookup)
    return {
        "seconds": time.monotonic() - started,
        "compiled": [str(key) for key in report.compiled],
        "hits": report.hits,
        "failed": {str(key): error.to_json() for key, error in report.failed.items()},
        "unpublished": len(report.unpublished),
        "waited": len(report.waited),
        "sha256": [report.entries[i.key].record.sha256 for i in items if i.key in report.entries],
        "own": [report.entries[i.key].toolchain == lookup.own for i in items if i.key in report.entries],
        "cutlass": "cutlass" in sys.modules,
    }


class Events(list):
    """What was told, each with its moment; written to a file as it comes."""

    def __init__(self, path, clock):
        super().__init__()
        self.path, self.clock, self.started = path, clock, clock()

    def tell(self, event):
        holder = event.holder
        who = holder and [holder.pid, holder.what]
        moment = self.clock() - self.started
        self.append([event.kind, str(event.key), round(event.seconds, 2), who, round(moment, 2)])
        if self.path is not None:
            with open(self.path, "a") as stream:
                stream.write(json.dumps(self[-1]) + "\n")


def main():
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    task = json.loads(sys.argv[1])
    items = wanted(task["count"], start=task.get("start", 0), target=task.get("target", TARGET))
    log = Path(task["log"]) if task.get("log") else None
    options = {"until": task.get("until"), "starts": task.get("starts", 0)}
    command = stub_command(
        Path(task["templates"]), log, task.get("seconds", 0.0), task.get("answer", "good"), **options
    )
    own_toolchain()
    if task.get("no_locks"):
        without_locks()
    share.REPORT_SECONDS = task.get("report_seconds", share.REPORT_SECONDS)
    share.PATIENCE_SECONDS = task.get("patience_seconds", share.PATIENCE_SECONDS)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    if task.get("forbid_compiler"):
        sys.modules["cutlass"] = None
    events = Events(task.get("events"), count_waits() if task.get("count_waits") else time.monotonic)
    try:
        report = run(task, items, settings_of(task), command, events.tell)
    except JitsparkError as error:
        report = {"error": error.to_json()}
    sys.stdout.write(json.dumps({**report, "events": events}) + "\n")


if __name__ == "__main__":
    main()
