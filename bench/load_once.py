"""One measurement of `bench.load`, in a process of its own: 64 kernels loaded, from the first import to the last check.

Prints one JSON object. The clock starts at the first import of jitspark; the interpreter's own start is not ours.
"""

import time

started, started_cpu = time.perf_counter(), time.process_time()
import jitspark.cache.loader  # noqa: E402 - the clock starts before it

imported = time.perf_counter()
import json  # noqa: E402 - as above
import sys  # noqa: E402 - as above
from pathlib import Path  # noqa: E402 - as above

from jitspark.cache.lookup import Lookup  # noqa: E402 - as above
from jitspark.key import Key  # noqa: E402 - as above
from jitspark.settings import from_environment  # noqa: E402 - as above


def main() -> None:
    settings = from_environment()
    keys = [Key(*parts) for parts in json.loads(Path(sys.argv[1]).read_text())]
    lookup = Lookup(settings)
    entries = lookup.find_all(keys)
    assert all(entry is not None for entry in entries), "the cache lacks entries"
    found = time.perf_counter()
    kernels = jitspark.cache.loader.Loader(settings).load([entry for entry in entries if entry is not None])
    done, done_cpu = time.perf_counter(), time.process_time()
    peak = peak_rss()
    for kernel in kernels:
        check_signature(kernel)
    foreign = sorted({"torch", "cutlass", "numpy", "filelock"} & set(sys.modules))
    report = {
        "kernels": len(kernels),
        "total_ms": 1e3 * (done - started),
        "processor_ms": 1e3 * (done_cpu - started_cpu),
        "import_ms": 1e3 * (imported - started),
        "find_ms": 1e3 * (found - imported),
        "load_ms": 1e3 * (done - found),
        "peak_rss_mb": peak,
        "foreign": foreign,
    }
    print(json.dumps(report))


def peak_rss() -> float:
    """The high-water mark of this process' own memory, in MB of 1e6 bytes (`getrusage` counts the parent's too)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def check_signature(kernel: jitspark.cache.loader.Kernel) -> None:
    """A call without arguments is refused with the kernel's own signature: this is the kernel that the record names."""
    refused = ""
    try:
        kernel.function()
    except TypeError as refusal:
        refused = str(refusal)
    assert kernel.entry.record.signature in refused, kernel.entry.key


main()
