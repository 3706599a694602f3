"""Loads and calls every entry of the roots that the environment names: `loading_user.py SITE`, with SITE on its path.

Prints one JSON object. Runs where there is neither compiler nor torch, as any user, with nothing to write to.
"""

import json
import os
import sys

sys.path.insert(0, sys.argv[1])

from jitspark.errors import EntryError
from jitspark.loader import Loader
from jitspark.lookup import Lookup
from jitspark.settings import from_environment
from jitspark.store import keys_in


def refusal(kernel):
    """A call without arguments is refused in the kernel's own words."""
    try:
        kernel.function()
    except TypeError as problem:
        return str(problem)
    return ""


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
        "foreign": sorted({"torch", "cutlass", "filelock", "cryptography", "zstandard", "typer"} & set(sys.modules)),
        "roots": [str(layer.root) for layer in lookup.roots.layers],
    }
    sys.stdout.write(json.dumps(report) + "\n")


main()
