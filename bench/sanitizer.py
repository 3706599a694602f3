"""`python -m bench.sanitizer`: every kernel's small cases under NVIDIA's compute-sanitizer, its reports sorted by case.

    python -m bench.sanitizer --pack kernels.tar --json sanitizer_<gpu>_<commit>.json

Runs `bench.sanitize` under each tool, a process for each kernel: behind a million hazards of one kernel racecheck falls
silent about all others. Exit status 0 when every process came to its end, all cases were launched, and no tool reported
an error; racecheck's warnings are listed and counted, for docs/measuring.md to explain.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench import machine, packed_cache
from jitspark.errors import JitsparkError
from jitspark.registry import kernel_names

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CASE, REPORT = "== ", "========= "
# A kernel's name in its machine code spells out its arguments' types: the case says which kernel it is.
KERNEL_NAME = re.compile(r"kernel_cutlass_\w+")


def reports_by_case(printed: str) -> tuple[list[str], list[dict[str, Any]], str]:
    """Cases that were launched; what the tool said of each that it spoke of; the tool's last line."""
    cases: list[str] = []
    reports: list[dict[str, Any]] = []
    said = ""
    for line in printed.splitlines():
        if line.startswith(CASE):
            cases.append(line.removeprefix(CASE))
        elif line.startswith(REPORT):
            said = KERNEL_NAME.sub("kernel", line.removeprefix(REPORT).strip())
            if said.startswith(("Error:", "Warning:", "Invalid", "Uninitialized", "Barrier error", "Program hit")):
                reports.append({"case": cases[-1] if cases else "", "lines": [said]})
            elif reports and said and "SUMMARY" not in said:
                reports[-1]["lines"].append(said)
    return cases, reports, said


def errors_of(summary: str) -> int:
    """Errors that a tool's last line counts; racecheck tells its warnings apart from them. -1 without such a line."""
    found = re.search(r"(\d+) errors", summary)
    return int(found.group(1)) if found else -1


def run_tool(tool: str, kernel: str, options: argparse.Namespace) -> dict[str, Any]:
    """One tool over a kernel's cases; `complete` when it came to its end and all of them were launched."""
    where = ("--pack", str(options.pack)) if options.pack else ("--cache", str(options.cache))
    launches = [sys.executable, "-P", "-m", "bench.sanitize", *where, "--kernel", kernel]
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=cutlass"]
    command += [*launches, "--cases", str(options.cases)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=options.seconds, check=False)
        printed, ended = done.stdout, f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as late:
        printed, ended = (late.stdout or b"").decode(errors="replace"), f"ended after {options.seconds} s"
    cases, reports, summary = reports_by_case(printed)
    return {
        "kernel": kernel,
        "ended": ended,
        "complete": ended == "exit status 0" and f"{len(cases)} cases were launched" in printed.splitlines(),
        "errors": errors_of(summary),
        "summary": summary,
        "cases": cases,
        "reports": reports,
    }


def run_kernels(tool: str, kernels: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """One tool over all of these kernels."""
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = list(pool.map(lambda kernel: run_tool(tool, kernel, options), kernels))
    return {
        "tool": tool,
        "complete": all(run["complete"] for run in runs),
        "errors": sum(abs(run["errors"]) for run in runs),
        "kernels": runs,
    }


def line(found: Mapping[str, Any]) -> str:
    runs = found["kernels"]
    cases, reports = (sum(len(run[what]) for run in runs) for what in ("cases", "reports"))
    reported = sum(bool(run["reports"]) for run in runs)
    cut = [run["kernel"] for run in runs if not run["complete"]]
    said = f"{found['tool']}: {cases} cases, {found['errors']} errors; {reports} reports"
    said += f" on {reported} of {len(runs)} kernels"
    return f"{said}; not complete: {', '.join(cut)}" if cut else said


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sanitizer", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel; may be repeated")
    parser.add_argument("--cases", type=int, default=2, help="of each kernel (default: 2)")
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: memcheck and racecheck")
    parser.add_argument("--seconds", type=float, default=300.0, help="of a process, at most (default: 300)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--commit", default="", help="what the result says it was run at")
    options = parser.parse_args(arguments)
    results = []
    try:
        about = machine.description(options.commit) if machine.own_target() else {}
        for tool in options.tool or TOOLS[:2]:
            results.append(run_kernels(tool, options.kernel or kernel_names(), options))
            print(line(results[-1]), flush=True)
            if options.json:
                options.json.write_text(json.dumps({**about, "tools": results}, indent=1) + "\n")
    except (JitsparkError, OSError) as error:
        print(f"sanitizer: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0 if all(each["complete"] and each["errors"] == 0 for each in results) else 1


if __name__ == "__main__":
    sys.exit(main())
