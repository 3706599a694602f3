"""What `bench.load` sets beside `bench.load_once`: 64 kernels from quack-kernels' cache. Prints one JSON object."""

import time

started, started_cpu = time.perf_counter(), time.process_time()
import cutlass  # noqa: E402 - the clock starts before it
from quack.rmsnorm import _compile_rmsnorm_fwd as cached  # noqa: E402 - as above

imported = time.perf_counter()
import json  # noqa: E402 - as above
import os  # noqa: E402 - as above
import sys  # noqa: E402 - as above
from pathlib import Path  # noqa: E402 - as above

BF16 = cutlass.BFloat16


def main() -> None:
    count = int(sys.argv[1])
    for number in range(1, count + 1):
        cached(BF16, BF16, None, BF16, None, None, 256 * number, False, False, False, False)  # noqa: FBT003 - its order
    done, done_cpu = time.perf_counter(), time.process_time()
    status = Path("/proc/self/status").read_text()
    info = cached.cache_info()
    report = {
        "kernels": count,
        "total_ms": 1e3 * (done - started),
        "processor_ms": 1e3 * (done_cpu - started_cpu),
        "import_ms": 1e3 * (imported - started),
        "load_ms": 1e3 * (done - imported),
        "peak_rss_mb": int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6,
        "misses": info.misses,
    }
    print(json.dumps(report), flush=True)
    os._exit(0)  # its teardown takes a second and is no part of a load


main()
