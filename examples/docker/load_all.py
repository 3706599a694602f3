"""Loads all kernels and plans of the cache that the environment names, as a serving process does, and says how long."""

import sys
import time

from cache_tools.plan_files import plans_in
from jitspark.cache.loader import Loader
from jitspark.cache.lookup import Lookup
from jitspark.cache.store import keys_in
from jitspark.settings import from_environment


def main() -> None:
    started = time.perf_counter()
    settings = from_environment()
    lookup = Lookup(settings)
    keys = sorted({key for layer in lookup.roots.layers for key, _ in keys_in(layer)})
    found = [entry for entry in lookup.find_all(keys) if entry is not None]
    kernels = Loader(settings).load(found)
    if not kernels or len(kernels) < len(keys):
        sys.exit(f"{len(kernels)} of {len(keys)} kernels loaded")
    plans = list(plans_in(lookup.roots.layers))
    unserved = {key for each in plans for key in each.plan.keys()} - set(keys)  # noqa: SIM118 - a plan is no mapping
    if unserved:
        sys.exit(f"plans name {len(unserved)} kernels that are not there")
    targets = ", ".join(sorted({key.target for key in keys}))
    milliseconds = 1000 * (time.perf_counter() - started)
    print(f"{len(kernels)} kernels for {targets} and {len(plans)} plans loaded in {milliseconds:.0f} ms")


main()
