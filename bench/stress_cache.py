"""A minute of 64 reader processes on a warm cache beside a builder, a pruner and a republisher.

`python bench/stress_cache.py [SECONDS]`; no GPU and no compiler. Prints one JSON object; any problem is exit status 1.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from stress_run import run_stress
from stub_cache import make_templates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("seconds", metavar="SECONDS", type=float, nargs="?", default=60.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "templates").mkdir()
        templates = make_templates(Path(folder) / "templates")
        counts, problems = run_stress(Path(folder), templates, processes=64, threads=1, seconds=seconds)
    cores = len(os.sched_getaffinity(0))
    print(json.dumps({"readers": 64, "seconds": seconds, "cores": cores, **counts, "problems": len(problems)}))
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
