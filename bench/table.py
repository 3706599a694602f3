"""Results of bin/bench-kernels as Markdown: `python -m bench.table RESULT.json... [--into docs/kernel_timings.md]`.

Of several results the first one counts: a later one adds what an earlier one has not at the same TP and M.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
OURS = "jitspark"
LAUNCH_COLUMNS = (
    *("part", "MB", "floor us", "ours us (p10..p90)", "TB/s", "from L2", "/ floor"),
    *("fastest other", "us", "/ ours", "aim us"),
)

RESOURCES = """\
Of the artifacts' machine code and the kernels' tilings; each kernel's smallest and largest figure. TB/s: the most that
one launch moved in this run, or a part that the kernel is never timed without."""


def markdown(result: Mapping[str, Any], name: str) -> str:
    """The whole section between the markers."""
    about = result["about"]
    head = (
        f"From `{name}`: {about['gpu']}, driver {about['driver']}, CUDA {about['cuda']}, torch {about['torch']}, "
        f"Triton {about['triton']}, commit {about['commit'] or 'not recorded'}, {about['date']}. "
        f"A pure read of 2 GiB in the same run: {result['read_tb_per_s']:.3f} TB/s."
    )
    parts = result.get("parts", [])
    sections = (
        _parts(parts),
        _tables(result["launches"]),
        _layers(result["layers"]),
        _resources(result),
        _wrong([*parts, *result["launches"]]),
        _left_out(result),
    )
    return "\n\n".join([head, *(text for section in sections for text in section)])


def _parts(parts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Parts of several launches, with every contender that ran and what this machine lacked."""
    for tp, num_tokens in dict.fromkeys((each["part"]["tp"], each["part"]["num_tokens"]) for each in parts):
        mine = [each for each in parts if (each["part"]["tp"], each["part"]["num_tokens"]) == (tp, num_tokens)]
        rows = [_part_row(each) for each in mine if OURS in each["timings"]]
        head = [
            f"### Parts of the step, TP {tp}, M = {num_tokens}",
            "",
            "| part | MB | floor us | ours us (p10..p90) | TB/s | / floor | others us (/ ours) | aim us |",
            "|---|---|---|---|---|---|---|---|",
        ]
        yield "\n".join([*head, *rows])


def _part_row(each: Mapping[str, Any]) -> str:
    ours, floor = each["timings"][OURS], each["floor_us"]
    median = ours["median_us"]
    others = [
        f"{name} {timing['median_us']:.2f} ({timing['median_us'] / median:.2f})"
        for name, timing in each["timings"].items()
        if name != OURS
    ]
    others += [f"absent: {name.partition(' (')[0]}" for name in each["absent"]]
    aim = _aim(each["aim_us"], median)
    spread = f"{median:.2f} ({ours['p10_us']:.2f}..{ours['p90_us']:.2f})"
    size = f"{each['moved_bytes'] / 1e6:.2f} | {floor:.2f}"
    rate = each["moved_bytes"] / median / 1e6
    ours_text = f"{spread} | {rate:.2f} | {median / floor:.2f}"
    return f"| {each['part']['part']} | {size} | {ours_text} | {'; '.join(others)} | {aim} |"


def _aim(aim_us: float | None, median: float) -> str:
    return "" if aim_us is None else f"{aim_us:.2f} {'met' if median <= aim_us else '**missed**'}"


def _resources(result: Mapping[str, Any]) -> Iterator[str]:
    """What each kernel takes of a multiprocessor: the range over its artifacts that the run asked for."""
    by_kernel: dict[str, list[Mapping[str, Any]]] = {}
    for took in result.get("resources", {}).values():
        if "kernel" in took:  # the first results of parts knew less
            by_kernel.setdefault(took["kernel"], []).append(took)
    if by_kernel:
        head = [
            "### What the kernels take",
            "",
            RESOURCES,
            "",
            "| kernel | artifacts | registers a thread | shared bytes a block | spilled bytes a thread | TB/s |",
            "|---|---|---|---|---|---|",
        ]
        rates = _rates(result)
        rows = [
            f"{_resource_row(kernel, took)} {rates.get(kernel, '')} |" for kernel, took in sorted(by_kernel.items())
        ]
        yield "\n".join([*head, *rows])


def _rates(result: Mapping[str, Any]) -> dict[str, str]:
    """Each kernel's highest bandwidth: of a launch alone, else of a part that it is in."""
    alone: dict[str, float] = {}
    together: dict[str, float] = {}
    for each in [*result["launches"], *result.get("parts", [])]:
        if OURS in each["timings"]:
            rate = each["moved_bytes"] / each["timings"][OURS]["median_us"] / 1e6
            launches = [each["launch"]] if "launch" in each else [*each["part"]["launches"].values()]
            found = alone if len(launches) == 1 else together
            for kernel in {launch["kernel"] for launch in launches}:
                found[kernel] = max(found.get(kernel, 0.0), rate)
    parts = {kernel: f"{rate:.2f} (part)" for kernel, rate in together.items()}
    return parts | {kernel: f"{rate:.2f}" for kernel, rate in alone.items()}


def _resource_row(kernel: str, took: Sequence[Mapping[str, Any]]) -> str:
    registers = _span([each["registers"] for each in took])
    shared = _span([each["shared_bytes"] for each in took])
    spilled = _span([each["stack_bytes"] + each["local_bytes"] for each in took])
    return f"| `{kernel}` | {len(took)} | {registers} | {shared} | {spilled} |"


def _span(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def _tables(launches: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for tp, num_tokens in dict.fromkeys(
        (each["launch"]["tp"], each["launch"]["axes"]["num_tokens"]) for each in launches
    ):
        mine = [e for e in launches if (e["launch"]["tp"], e["launch"]["axes"]["num_tokens"]) == (tp, num_tokens)]
        rows = [_row(each) for each in mine if OURS in each["timings"]]
        head = [
            f"### TP {tp}, M = {num_tokens}",
            "",
            f"| {' | '.join(LAUNCH_COLUMNS)} |",
            f"|{'---|' * len(LAUNCH_COLUMNS)}",
        ]
        yield "\n".join([*head, *rows])


def _row(each: Mapping[str, Any]) -> str:
    ours, floor = each["timings"][OURS], each["floor_us"]
    median = ours["median_us"]
    others = {name: timing["median_us"] for name, timing in each["timings"].items() if name != OURS}
    best = min(others, key=lambda name: others[name], default=None)
    other = f"{best} | {others[best]:.2f} | {others[best] / median:.2f}" if best else "none here |  | "
    aim = _aim(each["aim_us"], median)
    spread = f"{median:.2f} ({ours['p10_us']:.2f}..{ours['p90_us']:.2f})"
    size = f"{each['moved_bytes'] / 1e6:.2f} | {floor:.2f}"
    warm = f"{each['warm_timings'][OURS]['median_us']:.2f}" if each["warm_timings"] else ""
    ours_text = f"{spread} | {each['moved_bytes'] / median / 1e6:.2f} | {warm} | {median / floor:.2f}"
    return f"| {each['launch']['part']} | {size} | {ours_text} | {other} | {aim} |"


def _layers(layers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if layers:
        rows = [
            f"| {each['tp']} | {each['num_tokens']} | {each['floor_us']:.2f} | {each['us'][OURS]:.2f} "
            f"| {each['us']['baselines']:.2f} |"
            for each in layers
        ]
        head = [
            "### The dense launches of a backbone layer in a row",
            "",
            "Parts: " + ", ".join(layers[0]["parts"]) + ".",
            "",
        ]
        columns = ["| TP | M | floor us | ours us | fastest others us |", "|---|---|---|---|---|"]
        yield "\n".join([*head, *columns, *rows])


def _wrong(measured: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    found = [f"* {_place(each)}, {who}: {why}" for each in measured for who, why in each["wrong"].items()]
    if found:
        yield "\n".join(["Not timed, because the result was not the reference's:", "", *found])


def _left_out(result: Mapping[str, Any]) -> Iterator[str]:
    if result.get("failed"):
        found = [f"* {each['part']}: {each['problem']}" for each in result["failed"]]
        yield "\n".join(["Not measured, because of an error:", "", *found])
    if late := result.get("not_reached"):
        more = f" and the {len(late) - 1} behind it" if len(late) > 1 else ""
        yield f"Not reached before the run's time was over: {late[0]}{more}."


def _place(each: Mapping[str, Any]) -> str:
    if "launch" in each:
        return f"{each['launch']['part']}, M = {each['launch']['axes']['num_tokens']}"
    return f"{each['part']['part']}, M = {each['part']['num_tokens']}"


def without(result: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `result` adds to `earlier` ones: artifacts, and what they have not measured at the same TP and M."""
    left = dict(result)
    for kind in ("launches", "parts", "layers"):
        seen = {_identity(each) for other in earlier for each in other.get(kind, [])}
        left[kind] = [each for each in result.get(kind, []) if _identity(each) not in seen]
    told = {recipe for other in earlier for recipe in other.get("resources", {})}
    left["resources"] = {recipe: took for recipe, took in result.get("resources", {}).items() if recipe not in told}
    return left


def _identity(each: Mapping[str, Any]) -> tuple[str, int, int]:
    if "launch" in each:
        return each["launch"]["part"], each["launch"]["tp"], each["launch"]["axes"]["num_tokens"]
    place = each.get("part", each)
    return place.get("part", ""), place["tp"], place["num_tokens"]


def replace_section(
    text: str, section: str, markers: tuple[str, str] = (BEGIN, END), *, program: str = "table", where: object = None
) -> str:
    """`text` with what stands between the markers replaced; `program` and `where` are for the error without them."""
    before, begin, rest = text.partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not (begin and end):
        raise SystemExit(f"{program}: no line {markers[0]} followed by {markers[1]} in {where or 'the document'}")
    return f"{before}{begin}\n\n{section}\n\n{end}{after}"


def publish(section: str, into: Path | None, markers: tuple[str, str], program: str) -> None:
    """Print the section, or put it between a document's markers."""
    if into is None:
        print(section)
    else:
        into.write_text(replace_section(into.read_text(), section, markers, program=program, where=into))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.table", description=__doc__)
    parser.add_argument("result", type=Path, nargs="+")
    parser.add_argument(
        "--into", type=Path, metavar="FILE.md", help="replace the results there instead of printing them"
    )
    options = parser.parse_args(arguments)
    results = [json.loads(path.read_text()) for path in options.result]
    added = [without(result, results[:i]) for i, result in enumerate(results)]
    section = "\n\n".join(markdown(made, path.name) for made, path in zip(added, options.result, strict=True))
    publish(section, options.into, (BEGIN, END), "table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
