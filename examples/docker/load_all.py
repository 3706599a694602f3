"""Loads every kernel of the cache that the environment names, as a serving process would, and says how long it took."""

import sys
import time

from jitspark.loader import Loader
from jitspark.lookup import Lookup
from jitspark.settings import from_environment
from jitspark.store import keys_in


def main() -> None:
    started = time.perf_counter()
    settings = from_environment()
    lookup = Lookup(settings)
    keys = sorted({key for layer in lookup.roots.layers for key, _ in keys_in(layer)})
    found = [entry for entry in lookup.find_all(keys) if entry is not None]
    kernels = Loader(settings).load(found)
    if not kernels or len(kernels) < len(keys):
        sys.exit(f"{len(kernels)} of {len(keys)} kernels loaded")
    targets = ", ".join(sorted({key.target for key in keys}))
    print(f"{len(kernels)} kernels for {targets} loaded in {1000 * (time.perf_counter() - started):.0f} ms")


main()
