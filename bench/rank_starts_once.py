"""One rank of a cold start of `bench.rank_starts`: plans and kernels of a deployment, made, compiled and loaded.

Says `ready`, waits for a line, and prints one JSON object: seconds, how much there is, and the seconds that each
compile of this process took, by key.
"""

import json
import sys
import time

from jitspark.building.build import build_and_load, wanted_for
from jitspark.building.progress import Event
from jitspark.cache.loader import Loader
from jitspark.cache.lookup import Lookup
from jitspark.geometry import deployment
from jitspark.plans.planning import Plans, Served
from jitspark.registry import specializations
from jitspark.settings import from_environment


def main(geometry: str, tp: int, target: str) -> None:
    settings = from_environment()
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    lookup, compiled = Lookup(settings), {}

    def note(event: Event) -> None:
        if event.kind == "compiled":
            compiled[str(event.key)] = event.seconds

    wanted = wanted_for(specializations(deployment(geometry, tp)), [target])
    kernels = build_and_load(wanted, lookup, Loader(settings), settings, on_event=note)
    served = Served(geometry, tp, target, {})
    plans = Plans(served, lookup.roots.layers).get_all(served.requests())
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "kernels": len(kernels), "plans": len(plans), "compiled": compiled}))


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
