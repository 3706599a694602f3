"""What a measurement on a CPU says of itself. `bench.machine` is that of a GPU, and needs torch."""

import datetime as dt
import os
import platform
from pathlib import Path
from typing import Any


def description() -> dict[str, Any]:
    """The processor, how many cores this process may use and how busy they are, the interpreter, and the day."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }
