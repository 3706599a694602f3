"""Loads and calls every entry of the roots that the environment names: `loading_user.py SITE`, with SITE on its path.

`loading_user.py SITE GEOMETRY TP TARGET` also loads every plan that a worker of this deployment can ask for, and says
how many entries they name, and how many of those are not loaded.

Prints one JSON object. Runs where there is neither compiler nor torch, as any user, with nothing to write to.
"""

import json
import os
import sys

sys.path.insert(0, sys.argv[1])

from jitspark.cache.loader import Loader
from jitspark.cache.lookup import Lookup
from jitspark.cache.store import keys_in
from jitspark.errors import EntryError
from jitspark.plans.planning import Served
from jitspark.plans.store import PlanStore
from jitspark.settings import from_environment

FOREIGN = {"torch", "cutlass", "filelock", "cryptography", "zstandard", "typer", "msgspec", "kernel_specs.rmsnorm"}


def refusal(kernel):
    """A call without arguments is refused in the kernel's own words."""
    try:
        kernel.function()
    except TypeError as problem:
        return str(problem)
    return ""


def plans_of(geometry, tp, target, layers, loaded):
    requests = list(Served(geometry, int(tp), target, {}).requests())
    plans = PlanStore(layers).load(requests)
    named = {key for plan in plans for key in plan.keys()}  # noqa: SIM118 - a plan is no mapping
    return {"asked": len(requests), "plans": len(plans), "named": len(named), "unserved": len(named - loaded)}


def main():
    settings = from_environment()
    lookup = Lookup(settings)
    keys = sorted({key for layer in lookup.roots.layers for key, _ in keys_in(layer)})
    entries = lookup.find_all(keys)
    try:
        kernels = Loader(settings).load([entry for entry in entries if entry is not None])
    except EntryError as problem:
        sys.exit(str(problem))
    report = {
        "keys": len(keys),
        "loaded": len(kernels),
        "right": sum(kernel.entry.record.signature in refusal(kernel) for kernel in kernels),
        "compile": settings.compile,
        "writable": str(lookup.roots.writable),
        "uid": os.geteuid(),
        "home": os.environ.get("HOME"),
        "roots": [str(layer.root) for layer in lookup.roots.layers],
    }
    if len(sys.argv) > 2:
        report["deployment"] = plans_of(*sys.argv[2:], lookup.roots.layers, {kernel.entry.key for kernel in kernels})
    report["foreign"] = sorted(FOREIGN & set(sys.modules))
    sys.stdout.write(json.dumps(report) + "\n")


main()
