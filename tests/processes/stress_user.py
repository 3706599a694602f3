"""One of many that use a cache at once: `stress_user.py ROLE TASK`, with the task as JSON.

Roles: reader (looks up, verifies and runs kernels, in several threads), builder (builds whatever misses), pruner
(removes half), republisher (takes entries away and publishes them again). Prints one JSON report.
"""

import json
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path

sys.modules["torch"] = None  # apache-tvm-ffi would import it, for a second
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stub_cache import artifact_of, number_of, record_of, settings_for, stub_command, wanted  # noqa: E402

from cache_tools.prune import Rules, prune  # noqa: E402
from jitspark.building.build import build  # noqa: E402
from jitspark.cache.loader import Loader  # noqa: E402
from jitspark.cache.lookup import Lookup  # noqa: E402
from jitspark.cache.store import put, set_aside  # noqa: E402
from jitspark.errors import EntryError  # noqa: E402


def goes_on(task, counts):
    """Until the time is over and all processes have seen enough, however slow the machine is."""
    enough, folder = task["enough"], Path(task["seen_enough"])
    if all(counts[name] >= count for name, count in enough.items()):
        (folder / str(os.getpid())).touch()
    return time.monotonic() < task["until"] or len(os.listdir(folder)) < task["users"]


def reader(task, items, settings, counts):
    lookup, loader, choice = Lookup(settings), Loader(settings), random.Random()
    loaded = set()
    while goes_on(task, counts):
        item = choice.choice(items)
        entry = lookup.find(item.key, whole=True)
        counts["hit" if entry else "miss"] += 1
        if entry is None:
            continue
        try:
            content = entry.read_artifact()
            if item.key not in loaded:
                assert loader.load([entry])[0].function() == number_of(item), "a wrong kernel"
                loaded.add(item.key)
                counts["run"] += 1
        except EntryError as problem:
            if not isinstance(problem.__cause__, FileNotFoundError):
                raise
            counts["pruned meanwhile"] += 1
            continue
        assert number_of(item).to_bytes(8, "little") in content, "a wrong artifact"


def builder(task, items, settings, counts):
    command = stub_command(Path(task["templates"]))
    while goes_on(task, counts):
        report = build(items, Lookup(settings), settings, command=command)
        assert not report.failed, list(report.failed.values())
        assert not report.unpublished, list(report.unpublished.values())
        counts["compiled"] += len(report.compiled)
        time.sleep(0.02)


def pruner(task, items, settings, counts):
    layer = Lookup(settings).roots.writable_layer
    size = 14_500 * len(items) // 2
    while goes_on(task, counts):
        counts["pruned"] += len(prune(layer, Rules(max_size=size), settings).removed)
        time.sleep(0.05)


def republisher(task, items, settings, counts):
    layer, templates, choice = Lookup(settings).roots.writable_layer, Path(task["templates"]), random.Random()
    while goes_on(task, counts):
        item = choice.choice(items)
        content = artifact_of(item, templates)
        record = record_of(item, content)
        if choice.random() < 0.5:
            set_aside(layer, item.key, record.toolchain_digest)
        put(layer, item.key, record, content)
        counts["republished"] += 1


def main():
    role, task = globals()[sys.argv[1]], json.loads(sys.argv[2])
    items = wanted(task["count"])
    settings = settings_for(Path(task["root"]), Path(task["folder"]))
    counts, problems = Counter(), []
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    task["until"] = time.monotonic() + task["duration"]

    def run():
        try:
            role(task, items, settings, counts)
        except BaseException:  # noqa: BLE001 - whatever it is, the report tells it
            problems.append(traceback.format_exc())

    threads = [threading.Thread(target=run) for _ in range(task.get("threads", 1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.stdout.write(json.dumps({"counts": counts, "problems": problems}) + "\n")


if __name__ == "__main__":
    main()
