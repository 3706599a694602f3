"""Results of bin/bench-decode as Markdown: `python -m bench.decode_table RESULT.json... [--into docs/benchmarks.md]`.

The first in full; of the others the steps that those before do not have.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.table import publish

BEGIN, END = "<!-- steps: begin -->", "<!-- steps: end -->"


def markdown(result: Mapping[str, Any], name: str) -> str:
    """The section: every measured step, then where the first one's time goes."""
    about, points = result["about"], result["points"]
    head = (
        f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}, {about['date']}; one rank of TP "
        f"{result['tp']}, {result['layers']} layers; a pure read ran at {result['read_tb_per_s']:.3f} TB/s "
        f"(`bench/results/{name}`, drawn in the PNG beside it)."
    )
    blocks = [head, "\n".join(_steps(points))]
    detailed = next((each for each in points if "parts_us" in each), None)
    if detailed is not None:
        rate = result["read_tb_per_s"] * 1e6
        blocks += [f"Each part's launches of all layers alone, {_place(detailed['point'])}:"]
        blocks += ["\n".join(_parts(detailed, rate)), f"By operation: {_operations(detailed)}."]
    blocks += [_binding(points[0])]
    return "\n\n".join(blocks)


def more(result: Mapping[str, Any], name: str, known: Sequence[Mapping[str, Any]]) -> str:
    """The steps of another result beside those `known` already."""
    points = [each for each in result["points"] if each["point"] not in [other["point"] for other in known]]
    about = result["about"]
    head = (
        f"Of another run, commit {about['commit'] or about['date']}; a pure read ran at "
        f"{result['read_tb_per_s']:.3f} TB/s (`bench/results/{name}`):"
    )
    return "\n\n".join((head, "\n".join(_steps(points))))


def _steps(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| M | context | distinct experts | floor ms | ours ms | over the floor | vLLM's kernels ms | faster |"
    yield "|---|---|---|---|---|---|---|---|"
    for each in points:
        point, timings = each["point"], each["timings"]
        ours = timings["cute"]["median_us"]
        stock = timings.get("stock", {}).get("median_us")
        others = ("-", "-") if stock is None else (f"{stock / 1e3:.2f}", f"{stock / ours:.2f}")
        cells = (point["rows"], point["context"], point["distinct"], f"{each['floor_us'] / 1e3:.2f}")
        measured = (f"{ours / 1e3:.2f}", f"{ours / each['floor_us']:.2f}", *others)
        yield f"| {' | '.join(map(str, (*cells, *measured)))} |"


def _parts(point: Mapping[str, Any], rate: float) -> Iterator[str]:
    providers = list(point["parts_us"])
    yield f"| part | floor ms | {' | '.join('ours ms' if name == 'cute' else 'vLLM ms' for name in providers)} |"
    yield "|---|---|" + "---|" * len(providers)
    for part in point["parts_us"][providers[0]]:
        floor = point["floor_bytes"].get(part, 0.0) / rate / 1e3
        times = (f"{point['parts_us'][name][part] / 1e3:.2f}" for name in providers)
        yield f"| {part} | {floor:.2f} | {' | '.join(times)} |"


def _operations(point: Mapping[str, Any]) -> str:
    found = sorted(point["operations_us"].items(), key=lambda each: -each[1])
    return ", ".join(f"`{name}` {us / 1e3:.2f} ms" for name, us in found)


def _binding(point: Mapping[str, Any]) -> str:
    bind = point["bind"]["cute"]
    workspace, outputs, shared = (bind[f"{name}_bytes"] / 1e6 for name in ("workspace", "output", "symmetric"))
    return (
        f"Binding took {bind['seconds'] * 1e3:.0f} ms for {bind['launches']} launches, capturing them "
        f"{point['capture_s']['cute'] * 1e3:.0f} ms. The plan's workspace is {workspace:.1f} MB, its outputs "
        f"{outputs:.1f} MB, memory that ranks share {shared:.1f} MB; at most {point['peak_bytes'] / 1e9:.1f} GB were "
        "allocated, weights and KV cache included."
    )


def _place(point: Mapping[str, Any]) -> str:
    return f"M = {point['rows']}, context {point['context']}, {point['distinct']} distinct experts"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decode_table", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="replace what stands between the markers there")
    options = parser.parse_args(arguments)
    found = [json.loads(each.read_text()) for each in options.results]
    blocks = [markdown(found[0], options.results[0].name)]
    for index, path in enumerate(options.results[1:], start=1):
        known = [point for result in found[:index] for point in result["points"]]
        blocks.append(more(found[index], path.name, known))
    section = "\n\n".join(blocks)
    publish(section, options.into, (BEGIN, END), "decode-table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
