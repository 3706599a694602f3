"""A result of bin/bench-draft as Markdown: `python -m bench.draft_table RESULT.json [--into docs/benchmarks.md]`."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.table import publish

BEGIN, END = "<!-- draft: begin -->", "<!-- draft: end -->"
PARTS = (
    ("context", "context rows"),
    ("forward", "forward"),
    ("sampling", "logits and sampling"),
    ("loop", "sampling loop alone"),
    ("step", "whole step"),
)


def lines(result: Mapping[str, Any], name: str) -> Iterator[str]:
    about, runs = result["about"], result["runs"]
    context = runs[0]["context"]
    machine = f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, {about['date']}"
    yield f"{machine}; a pure read ran at {result['read_tb_per_s']:.3f} TB/s (`bench/results/{name}`)."
    told = "microseconds: ours (over its floor) / vLLM's kernels"
    yield f"One rank of TP {result['tp']}, requests of {context} tokens; {told}."
    yield ""
    yield "| R | " + " | ".join(title for _, title in PARTS) + " |"
    yield "|---|" + "---|" * len(PARTS)
    for run in runs:
        yield f"| {run['requests']} | " + " | ".join(_cell(run, part) for part, _ in PARTS) + " |"
    yield ""
    floors = runs[0]["floor_bytes"]
    shown = ", ".join(f"{title} {floors[part] / 1e6:.0f} MB" for part, title in PARTS if part in floors)
    yield f"Floors at R = 1: {shown}; {floors['step_read_once'] / 1e6:.0f} MB if the loop's weight is read only once."
    yield f"Launches: {_launches(runs[0])}."
    if apart := list(filter(None, (_apart(runs, part) for part in ("context", "forward")))):
        yield ""
        yield f"Keys and values that both wrote in this run are apart by at most {', '.join(apart)} of their norm."


def _apart(runs: Sequence[Mapping[str, Any]], part: str) -> str:
    """The most, and which runs it is of where some could not be compared."""
    compared = [run for run in runs if part in run.get("apart", {})]
    if not compared:
        return ""
    most = max(run["apart"][part] for run in compared)
    which = "" if len(compared) == len(runs) else f", R = {', '.join(str(run['requests']) for run in compared)}"
    return f"{most:.1e} ({part}{which})"


def _cell(run: Mapping[str, Any], part: str) -> str:
    timings = run["timings"]
    mine, stock = timings.get(f"{part}_us"), timings.get(f"{part}_stock")
    theirs = f"{stock['median_us']:.0f}" if stock else "-"
    if mine is None:
        return f"- / {theirs}"
    ratio = mine["median_us"] / run["floor_us"][part]
    return f"{mine['median_us']:.1f} ({ratio:.2f}) / {theirs}"


def _launches(run: Mapping[str, Any]) -> str:
    names = {"draft_context": "context rows", "draft": "forward", "markov": "logits and sampling"}
    return ", ".join(f"{count} ({names[stage]})" for stage, count in run["launches"].items())


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.draft_table", description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="replace what stands between the markers there")
    options = parser.parse_args(arguments)
    text = "\n".join(lines(json.loads(options.result.read_text()), options.result.name))
    publish(text, options.into, (BEGIN, END), "draft-table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
