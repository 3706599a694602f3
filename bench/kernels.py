"""`bin/bench-kernels`: every kernel of a pack on this GPU, in CUDA graphs, beside what else does the same work.

Method: docs/measuring.md. Prints a table and writes bench/results/kernels_<gpu>_<commit or date>.json.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench import layer, machine, measure, packed_cache, scene
from bench.scenes import BUILD
from bench.timing import read_rate
from jitspark.checking.packed import Kernels, load_kernels
from jitspark.errors import JitsparkError, PackError
from jitspark.key import recipe_of

RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"bench-kernels: {error}", file=sys.stderr)
        return error.exit_code


@dataclass(slots=True)
class _Run:
    """What is measured and with what; the result file holds at any time all that was found so far."""

    options: argparse.Namespace
    target: str
    kernels: Kernels
    rate: float
    generator: torch.Generator
    head: dict[str, Any]
    path: Path
    begun: float = field(default_factory=time.monotonic)
    found: list[measure.Measured] = field(default_factory=list)
    parts: list[scene.MeasuredPart] = field(default_factory=list)
    failed: list[dict[str, str]] = field(default_factory=list)
    not_reached: list[str] = field(default_factory=list)

    def each(self, wanted: Sequence[Mapping[str, Any]], one: Callable[["_Run", Mapping[str, Any]], None]) -> None:
        """Measure one after the other until the time is over; what cannot be measured is told and left out."""
        for place in wanted:
            if time.monotonic() - self.begun > self.options.seconds:
                self.not_reached.append(_title(place))
                continue
            try:
                one(self, place)
            except (RuntimeError, TypeError, ValueError, AssertionError) as problem:
                said = f"{type(problem).__name__}: {problem}".splitlines()[0]
                self.failed.append({"part": _title(place), "problem": said})
                print(f"{_title(place)}  FAILED: {said}", flush=True)
                torch.cuda.synchronize()  # a fault that took the context along ends the run here
            self.save()
            torch.cuda.empty_cache()

    def clock(self) -> str:
        return f"  [{time.monotonic() - self.begun:.0f} s]"

    def save(self) -> None:
        about = {**self.head, "failed": self.failed, "not_reached": self.not_reached}
        write(self.path, about, self.found, self.parts)

    @property
    def right(self) -> bool:
        """Whether ours could be timed wherever it was tried."""
        return not self.failed and not any(measure.OURS in each.wrong for each in (*self.found, *self.parts))


def _run(options: argparse.Namespace) -> int:
    target = machine.own_target()
    machine.leave_on_sigterm()
    with packed_cache.cache_root(options) as root:
        manifest = packed_cache.read_manifest(root)
        chosen, parts = _chosen(manifest, target, options), _chosen_parts(manifest, options)
        needed = [*chosen, *(launch for part in parts for launch in part["launches"].values())]
        kernels = load_kernels(root, [packed_cache.specialization_of(launch) for launch in needed], target)
    about = machine.description(options.commit)
    rate = read_rate()
    recipes = {launch["recipe"] for launch in needed}
    resources = {recipe: took for recipe, took in manifest.get("resources", {}).items() if recipe in recipes}
    run = _Run(
        options,
        target,
        kernels,
        rate,
        torch.Generator(device="cuda").manual_seed(options.seed),
        {"about": about, "read_tb_per_s": rate / 1e6, "layers": [], "resources": resources},
        options.out / f"{machine.file_stem('kernels', about)}{options.label}.json",
    )
    print(f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}: reads {rate / 1e6:.3f} TB/s")
    print(measure.heading(), flush=True)
    run.each(parts, _measure_part)
    run.each(chosen, _measure)
    if not run.not_reached:
        run.head["layers"] = list(_layers(run))
    run.save()
    print(run.path)
    if run.not_reached:
        print(f"not reached in {options.seconds:g} s: {'; '.join(run.not_reached)}")
    return 0 if run.right else 1


def _title(place: Mapping[str, Any]) -> str:
    tp, num_tokens = _size(place)
    return f"{place['part']}, TP {tp}, M = {num_tokens}"


def _size(each: Mapping[str, Any]) -> tuple[int, int]:
    """TP and number of tokens of a part or a launch."""
    return each["tp"], each["num_tokens"] if "num_tokens" in each else each["axes"]["num_tokens"]


def _chosen(manifest: Mapping[str, Any], target: str, options: argparse.Namespace) -> list[Mapping[str, Any]]:
    """The launches that the options ask for, in the order of its kernels if it names any, smallest TP and M first."""
    if manifest["target"] != target:
        raise PackError(
            where="pack",
            found=f"kernels for {manifest['target']}",
            needed=f"kernels for {target}, as this GPU is",
            remedy=f"Make it with bin/make-gpu-pack --target {target}.",
        )
    wanted = [
        launch
        for launch in manifest["launches"]
        if launch["axes"]["num_tokens"] in options.m
        and launch["tp"] in (options.tp or [launch["tp"]])
        and launch["kernel"] in (options.kernel or [launch["kernel"]])
        and not options.part
    ]
    order = {kernel: place for place, kernel in enumerate(options.kernel)}
    return sorted(wanted, key=lambda launch: (order.get(launch["kernel"], 0), _size(launch)))


def _chosen_parts(manifest: Mapping[str, Any], options: argparse.Namespace) -> list[Mapping[str, Any]]:
    """The parts of several launches that the options ask for."""
    return [
        part
        for part in manifest.get("parts", [])
        if not options.alone
        and part["num_tokens"] in options.m
        and part["tp"] in (options.tp or [part["tp"]])
        and (not options.kernel or any(launch["kernel"] in options.kernel for launch in part["launches"].values()))
        and (not options.part or any(text in part["part"] for text in options.part))
    ]


def _measure(run: _Run, launch: Mapping[str, Any]) -> None:
    kernel = run.kernels[recipe_of(packed_cache.specialization_of(launch), run.target).key].function
    run.found.append(measure.measure(launch, kernel, run.rate, run.generator, run.options.replays))
    print(f"{measure.line(run.found[-1])}{run.clock()}", flush=True)


def _measure_part(run: _Run, part: Mapping[str, Any]) -> None:
    by_role = {
        role: run.kernels[recipe_of(packed_cache.specialization_of(launch), run.target).key].function
        for role, launch in part["launches"].items()
    }
    made = BUILD[part["kind"]](part, by_role, run.generator)
    run.parts.append(scene.measure_part(part, made, run.rate, run.options.replays))
    print(f"{scene.part_line(run.parts[-1])}{run.clock()}", flush=True)


def _layers(run: _Run) -> Iterator[dict[str, Any]]:
    by_recipe = {key.recipe: kernel.function for key, kernel in run.kernels.items() if key.target == run.target}
    for size in dict.fromkeys(_size(each.launch) for each in run.found):
        mine = [each for each in run.found if _size(each.launch) == size]
        result = layer.measure_layer(mine, by_recipe, run.generator, run.options.replays)
        if result is not None:
            print(layer.line(result), flush=True)
            yield result


def write(
    path: Path,
    head: Mapping[str, Any],
    found: Sequence[measure.Measured],
    parts: Sequence[scene.MeasuredPart] = (),
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "format": 2,
        **head,
        "parts": [each.to_json() for each in parts],
        "launches": [each.to_json() for each in found],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bin/bench-kernels", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--m", type=int, nargs="+", default=[8], help="token counts (default: 8)")
    parser.add_argument("--tp", type=int, nargs="+", help="TP sizes (default: all of the pack)")
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel; may be repeated")
    parser.add_argument("--part", action="append", default=[], help="only parts whose name holds this; may be repeated")
    parser.add_argument("--alone", action="store_true", help="launches alone, no parts of several")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin nothing new after this many")
    parser.add_argument("--label", default="", help="what the result's file name ends in, such as _tp4")
    machine.add_arguments(parser, RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
