"""Results of bin/bench-decode-ranks as Markdown: `python -m bench.decode_ranks_table RESULT.json [--into FILE.md]`."""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.table import publish

BEGIN, END = "<!-- steps of groups: begin -->", "<!-- steps of groups: end -->"
HEAD = ("experts", "M", "context", "distinct", "floor", "ours", "over the floor", "exchanges alone", "share",
        "to itself", "over NCCL", "vLLM's", "faster")  # fmt: skip
EXPERTS = {"slices": "a slice of each", "whole": "whole ones"}


def markdown(result: Mapping[str, Any], name: str) -> str:
    """What one result shows: its steps, and what was checked of them."""
    about, points = result["about"], result["points"]
    where = "one rank alone, which exchanges with itself" if result.get("alone") else f"{result['tp']} GPUs"
    head = (
        f"TP {result['tp']}, {where}: {about['gpu']}, driver {about['driver']}, torch {about['torch']}, "
        f"{about['date']}; {result['layers']} layers; the slowest GPU's pure read ran at "
        f"{result['read_tb_per_s']:.3f} TB/s (`bench/results/{name}`). Times in ms."
    )
    table = [_row(HEAD), "|" + "---|" * len(HEAD), *map(_row, map(_cells, points))]
    return "\n\n".join((head, "\n".join(table), " ".join(_said(result))))


def _row(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _cells(found: Mapping[str, Any]) -> Iterator[str]:
    """In the order of HEAD. `found` has what its providers and `details` left there."""
    point = found["point"]
    times = {name: each["median_us"] for name, each in found["timings"].items()}
    alone = "cute" not in times
    ours, floor = times["cute alone" if alone else "cute"], found["floor_us"]
    exchanges = found.get("parts_us", {}).get("cute alone" if alone else "cute", {}).get("exchanges")
    yield EXPERTS[found["experts"]]
    yield from (str(point[name]) for name in ("rows", "context", "distinct"))
    yield from (_ms(floor), _ms(ours), f"{ours / floor:.2f}")
    yield _ms(exchanges)
    yield "" if exchanges is None else f"{100 * exchanges / ours:.0f} %"
    yield from (_ms(times.get(name)) for name in ("" if alone else "cute alone", "nccl", "stock"))
    yield f"{times['stock'] / ours:.2f}" if "stock" in times else ""


def _ms(us: float | None) -> str:
    return "" if us is None else f"{us / 1e3:.3f}"


def _said(result: Mapping[str, Any]) -> Iterator[str]:
    points = result["points"]
    checked = [each for each in points if each.get("equal_replays")]
    wrong = [text for each in points for text in each["problems"]]
    if checked:
        sizes = ", ".join(sorted({str(each["point"]["rows"]) for each in checked}, key=int))
        outcome = f"PROBLEMS: {'; '.join(wrong)}" if wrong else "always the same bits on all ranks"
        yield f"{checked[0]['equal_replays']} replays each with M = {sizes} and changing inputs: {outcome}."
    busiest = [each for each in points if each["busiest_experts"]]
    if busiest:
        first = busiest[0]
        balanced = first["point"]["distinct"] / result["tp"]
        yield (
            f"With whole experts the busiest rank of a layer has {first['busiest_experts']:.1f} distinct ones of "
            f"{balanced:.1f} on average at M = {first['point']['rows']}."
        )
    if not result.get("alone"):
        bind = max(each["bind_s"]["cute"] for each in points)
        yield (
            f"Each rank read {result['plans']} plans and loaded {result['kernels']} kernels from one read-only cache, "
            f"all at one time, in {max(result['load_s']):.2f} s at most; binding took {bind * 1e3:.0f} ms at most."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decode_ranks_table", description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--into", type=Path, metavar="FILE.md", help="replace what stands between the markers there")
    options = parser.parse_args(arguments)
    section = "\n\n".join(markdown(json.loads(each.read_text()), each.name) for each in options.results)
    publish(section, options.into, (BEGIN, END), "decode-ranks-table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
