"""`bin/bench-kernels`: every kernel of a pack on this GPU, in CUDA graphs, beside what else does the same work.

Method: docs/benchmarks.md. Prints a table and writes bench/results/kernels_<gpu>_<commit or date>.json.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
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


def _run(options: argparse.Namespace) -> int:
    target = machine.own_target()
    with packed_cache.cache_root(options) as root:
        manifest = packed_cache.read_manifest(root)
        chosen, parts = _chosen(manifest, target, options), _chosen_parts(manifest, options)
        needed = [*chosen, *(launch for part in parts for launch in part["launches"].values())]
        kernels = load_kernels(root, [measure.specialization_of(launch) for launch in needed], target)
    about = machine.description(options.commit)
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    rate = read_rate()
    print(f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}: reads {rate / 1e6:.3f} TB/s")
    print(measure.heading(), flush=True)
    found: list[measure.Measured] = []
    found_parts: list[scene.MeasuredPart] = []
    layers: list[dict[str, Any]] = []
    path = options.out / f"{machine.file_stem('kernels', about)}.json"
    try:
        for size in dict.fromkeys(_size(each) for each in (*parts, *chosen)):
            mine = [part for part in parts if _size(part) == size]
            found_parts += (_measure_part(part, kernels, target, rate, generator, options.replays) for part in mine)
            alone = [launch for launch in chosen if _size(launch) == size]
            found += (_measure(launch, kernels, target, rate, generator, options.replays) for launch in alone)
        layers += _layers(found, kernels, target, generator, options.replays)
    finally:  # what was measured before an interrupt or a fault is kept
        used = {launch["recipe"] for part in parts for launch in part["launches"].values()}
        used |= {launch["recipe"] for launch in chosen}
        resources = {recipe: took for recipe, took in manifest.get("resources", {}).items() if recipe in used}
        head = {"about": about, "read_tb_per_s": rate / 1e6, "layers": layers, "resources": resources}
        write(path, head, found, found_parts)
        print(path)
    wrong = [each.wrong for each in found] + [each.wrong for each in found_parts]
    return 1 if any(measure.OURS in each for each in wrong) else 0


def _size(each: Mapping[str, Any]) -> tuple[int, int]:
    """TP and number of tokens of a part or a launch."""
    return each["tp"], each["num_tokens"] if "num_tokens" in each else each["axes"]["num_tokens"]


def _chosen(manifest: Mapping[str, Any], target: str, options: argparse.Namespace) -> list[Mapping[str, Any]]:
    """The launches that the options ask for, smallest token count first."""
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
    return sorted(wanted, key=lambda launch: int(launch["axes"]["num_tokens"]))


def _chosen_parts(manifest: Mapping[str, Any], options: argparse.Namespace) -> list[Mapping[str, Any]]:
    """The parts of several launches that the options ask for."""
    return [
        part
        for part in manifest.get("parts", [])
        if part["num_tokens"] in options.m
        and part["tp"] in (options.tp or [part["tp"]])
        and (not options.kernel or any(launch["kernel"] in options.kernel for launch in part["launches"].values()))
        and (not options.part or any(text in part["part"] for text in options.part))
    ]


def _measure(
    launch: Mapping[str, Any],
    kernels: Kernels,
    target: str,
    rate: float,
    generator: torch.Generator,
    replays: int,
) -> measure.Measured:
    kernel = kernels[recipe_of(measure.specialization_of(launch), target).key].function
    found = measure.measure(launch, kernel, rate, generator, replays)
    print(measure.line(found), flush=True)
    torch.cuda.empty_cache()
    return found


def _measure_part(
    part: Mapping[str, Any],
    kernels: Kernels,
    target: str,
    rate: float,
    generator: torch.Generator,
    replays: int,
) -> scene.MeasuredPart:
    by_role = {
        role: kernels[recipe_of(measure.specialization_of(launch), target).key].function
        for role, launch in part["launches"].items()
    }
    found = scene.measure_part(part, BUILD[part["kind"]](part, by_role, generator), rate, replays)
    print(scene.part_line(found), flush=True)
    torch.cuda.empty_cache()
    return found


def _layers(
    found: Sequence[measure.Measured], kernels: Kernels, target: str, generator: torch.Generator, replays: int
) -> Iterator[dict[str, Any]]:
    by_recipe = {key.recipe: kernel.function for key, kernel in kernels.items() if key.target == target}
    for tp, num_tokens in dict.fromkeys((each.launch["tp"], each.launch["axes"]["num_tokens"]) for each in found):
        mine = [each for each in found if (each.launch["tp"], each.launch["axes"]["num_tokens"]) == (tp, num_tokens)]
        result = layer.measure_layer(mine, by_recipe, generator, replays)
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
    machine.add_arguments(parser, RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
