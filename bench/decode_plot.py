"""A result of bin/bench-decode as a picture: `python -m bench.decode_plot RESULT.json`. Needs matplotlib.

Left: every measured step beside its read floor. Right: where the first step's time goes, part by part.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

NAMES = {"cute": "jitspark", "stock": "vLLM's kernels"}
COLORS = {"cute": "tab:blue", "stock": "tab:orange"}


def draw(result: Mapping[str, Any], path: Path) -> None:
    points = result["points"]
    figure, (steps, parts) = plt.subplots(1, 2, figsize=(15, 6.5), width_ratios=(1.3, 1))
    _steps(steps, points)
    detailed = next((each for each in points if "parts_us" in each), None)
    if detailed is not None:
        _parts(parts, detailed, result["read_tb_per_s"] * 1e6)
    about = result["about"]
    figure.suptitle(
        f"One rank of TP {result['tp']}, {result['layers']} layers, on {about['gpu']}: a decode step in a CUDA graph, "
        f"commit {about['commit'] or about['date']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _steps(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    axes.set_title("median of a step, and the floor: bytes read over the measured read rate")
    places = range(len(points))
    names = list(points[0]["timings"])
    for index, name in enumerate(names):
        values = [each["timings"][name]["median_us"] / 1e3 for each in points]
        bars = axes.bar([p + 0.38 * index for p in places], values, 0.36, color=COLORS[name], label=NAMES[name])
        axes.bar_label(bars, fmt="%.1f", fontsize=8)
    for place, each in enumerate(points):
        floor = each["floor_us"] / 1e3
        axes.hlines(floor, place - 0.2, place + 0.38 * len(names) - 0.16, color="black")
    axes.plot([], [], color="black", label="floor")
    axes.set_xticks(
        [p + 0.19 * (len(names) - 1) for p in places], [_label(each["point"]) for each in points], fontsize=8
    )
    axes.set_ylabel("ms")
    axes.legend()


def _label(point: Mapping[str, Any]) -> str:
    return f"M {point['rows']}\n{point['context'] // 1024}k\nD {point['distinct']}"


def _parts(axes: Any, point: Mapping[str, Any], bytes_per_us: float) -> None:
    label = _label(point["point"]).replace("\n", ", ")
    axes.set_title(f"each part's launches of all layers alone ({label})")
    parts = list(next(iter(point["parts_us"].values())))
    floors = [point["floor_bytes"].get(part, 0.0) / bytes_per_us / 1e3 for part in parts]
    for index, (name, found) in enumerate(point["parts_us"].items()):
        values = [found[part] / 1e3 for part in parts]
        bars = axes.barh(
            [p + 0.3 * index for p in range(len(parts))], values, 0.28, color=COLORS[name], label=NAMES[name]
        )
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    places = [p + 0.3 * len(point["parts_us"]) for p in range(len(parts))]
    axes.bar_label(axes.barh(places, floors, 0.28, color="black", label="floor"), fmt="%.2f", fontsize=8)
    axes.set_yticks([p + 0.3 for p in range(len(parts))], parts)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.legend()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.decode_plot", description=__doc__)
    parser.add_argument("result", type=Path)
    options = parser.parse_args(arguments)
    path = options.result.with_suffix(".png")
    draw(json.loads(options.result.read_text()), path)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
