"""One measurement of `bench.plan_load`, in a process of its own: a deployment's plans, read and checked, then loaded.

Prints one JSON object. Imports come first; then the clocks run: plans (bytes, digest, form, order of reads and writes,
places), the entries that they name (records), and their kernels (artifacts, mapped).
"""

import json
import sys
import time

started = time.perf_counter()
from jitspark.cache.loader import Loader  # noqa: E402 - the clock starts before it
from jitspark.cache.lookup import Lookup  # noqa: E402 - as above
from jitspark.cache.runtime_library import without_collecting  # noqa: E402 - as above
from jitspark.plans.plan import Stage  # noqa: E402 - as above
from jitspark.plans.planning import Plans, Served  # noqa: E402 - as above
from jitspark.settings import from_environment  # noqa: E402 - as above

imported = time.perf_counter()


def main(geometry: str, tp: int, target: str) -> None:
    settings = from_environment()
    began, began_cpu = time.perf_counter(), time.process_time()
    lookup = Lookup(settings)
    served = Served(geometry, tp, target, {})
    decode = [each for each in served.requests() if each.stage is Stage.DECODE]
    others = [each for each in served.requests() if each.stage is not Stage.DECODE]
    with without_collecting():
        reader = Plans(served, lookup.roots.layers, may_make=False)
        plans = reader.get_all(decode)
        read, read_cpu = time.perf_counter(), time.process_time()
        plans += reader.get_all(others)
    every = time.perf_counter()
    keys = list(dict.fromkeys(key for plan in plans for key in plan.keys()))  # noqa: SIM118 - no mapping
    entries = [entry for entry in lookup.find_all(keys) if entry is not None]
    assert len(entries) == len(keys), "the cache lacks entries"
    found = time.perf_counter()
    kernels = Loader(settings).load(entries)
    loaded, loaded_cpu = time.perf_counter(), time.process_time()
    report = {
        "plans": len(plans),
        "decode_plans": len(decode),
        "launches": sum(len(plan.launches) for plan in plans),
        "kernels": len(kernels),
        "import_ms": 1e3 * (imported - started),
        "decode_plans_ms": 1e3 * (read - began),
        "decode_plans_processor_ms": 1e3 * (read_cpu - began_cpu),
        "plans_ms": 1e3 * (every - began),
        "entries_ms": 1e3 * (found - every),
        "kernels_ms": 1e3 * (loaded - found),
        "total_ms": 1e3 * (loaded - began),
        "total_processor_ms": 1e3 * (loaded_cpu - began_cpu),
        "foreign": sorted({"torch", "cutlass", "msgspec", "numpy"} & set(sys.modules)),
    }
    print(json.dumps(report))


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
