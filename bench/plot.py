"""Results as a roofline: `python -m bench.plot RESULT.json... [--m 8]` writes a PNG beside the first. Needs matplotlib.

Every kernel here is bound by memory, so the roof is the measured read rate; what is missing to it at small sizes is
launch latency.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from bench.table import without

OURS = "jitspark"
LABELLED_BYTES = 1.5e6  # smaller launches crowd together at the left
LABEL_WIDTH, LABEL_HEIGHT = 0.9, 0.11  # of a label, in decades of bytes and TB/s: no two in the same place


def draw(result: Mapping[str, Any], num_tokens: int, path: Path) -> None:
    """Achieved TB/s over bytes moved: ours, the fastest other, the roof, and the curve of a fixed launch cost."""
    rate = result["read_tb_per_s"]
    chosen = [each for each in _named(result) if each["num_tokens"] == num_tokens and OURS in each["timings"]]
    figure, axes = plt.subplots(figsize=(11, 6.5))
    sizes = [10 ** (4.5 + 0.05 * i) for i in range(90)]
    axes.plot(sizes, [rate] * len(sizes), color="black", label=f"read of 2 GiB: {rate:.2f} TB/s")
    with_slack = [size / (size / rate + 1.2e6) for size in sizes]
    axes.plot(sizes, with_slack, color="grey", linestyle="--", label="floor + 1.2 us")
    _points(axes, chosen)
    axes.set_xscale("log")
    axes.set_xlim(right=8e9)  # room for the last labels
    axes.set_xlabel("bytes that one launch must move")
    axes.set_ylabel("TB/s")
    axes.set_ylim(0, 1.1 * rate)
    about = result["about"]
    axes.set_title(
        f"{about['gpu']}, M = {num_tokens}, medians in CUDA graphs, commit {about['commit'] or about['date']}"
    )
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _named(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Single launches and parts of several, alike. One GEMM of the experts alone is left to the tables."""
    launches = [
        {**each, "name": each["launch"]["part"], "num_tokens": each["launch"]["axes"]["num_tokens"]}
        for each in result["launches"]
    ]
    parts = [
        {**each, "name": each["part"]["part"], "num_tokens": each["part"]["num_tokens"]}
        for each in result.get("parts", [])
        if not each["part"]["part"].endswith(" GEMM")
    ]
    return launches + parts


def _points(axes: Any, chosen: Sequence[Mapping[str, Any]]) -> None:
    ours = [(each["moved_bytes"], _rate(each, each["timings"][OURS])) for each in chosen]
    others = [(each["moved_bytes"], _rate(each, best)) for each in chosen if (best := _fastest_other(each))]
    axes.scatter(*zip(*others, strict=True), marker="x", color="tab:orange", label="fastest other") if others else None
    axes.scatter(*zip(*ours, strict=True), marker="o", color="tab:blue", label="jitspark") if ours else None
    labelled: list[tuple[float, float]] = []
    for each, (size, rate) in sorted(zip(chosen, ours, strict=True), key=lambda found: "part" not in found[0]):
        place = math.log10(size), rate
        free = all(abs(place[0] - x) > LABEL_WIDTH or abs(rate - y) > LABEL_HEIGHT for x, y in labelled)
        if size > LABELLED_BYTES and free:
            labelled.append(place)
            axes.annotate(each["name"], (size, rate), textcoords="offset points", xytext=(6, -10), fontsize=8)


def _fastest_other(each: Mapping[str, Any]) -> Mapping[str, Any] | None:
    others = [timing for name, timing in each["timings"].items() if name != OURS]
    return min(others, key=lambda timing: timing["median_us"], default=None)


def _rate(each: Mapping[str, Any], timing: Mapping[str, Any]) -> float:
    return float(each["moved_bytes"] / timing["median_us"] / 1e6)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description=__doc__)
    parser.add_argument("result", type=Path, nargs="+", help="a later one adds what an earlier one has not")
    parser.add_argument("--m", type=int, default=8, help="token count to draw (default: 8)")
    options = parser.parse_args(arguments)
    path = options.result[0].with_suffix(".png")
    results = [json.loads(each.read_text()) for each in options.result]
    added = [without(result, results[:i]) for i, result in enumerate(results)]
    together = {kind: [each for result in added for each in result[kind]] for kind in ("launches", "parts")}
    draw({**results[0], **together}, options.m, path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
