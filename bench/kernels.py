"""`bin/bench-kernels`: every kernel of a pack on this GPU, in CUDA graphs, beside what else does the same work.

Method: docs/benchmarks.md. Prints a table and writes bench/results/kernels_<gpu>_<commit or date>.json.
"""

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import layer, machine, measure, packed_cache
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
        chosen = _chosen(packed_cache.read_manifest(root), target, options)
        kernels = load_kernels(root, [measure.specialization_of(launch) for launch in chosen], target)
    about = machine.description(options.commit)
    generator = torch.Generator(device="cuda").manual_seed(options.seed)
    rate = read_rate()
    print(f"{about['gpu']}, driver {about['driver']}, torch {about['torch']}: reads {rate / 1e6:.3f} TB/s")
    print(measure.heading(), flush=True)
    found: list[measure.Measured] = []
    layers: list[dict[str, Any]] = []
    path = options.out / f"{machine.file_stem('kernels', about)}.json"
    try:
        found += _measure_all(chosen, kernels, target, rate, generator, options.replays)
        layers += _layers(found, kernels, target, generator, options.replays)
    finally:  # what was measured before an interrupt or a fault is kept
        write(path, {"about": about, "read_tb_per_s": rate / 1e6, "layers": layers}, found)
        print(path)
    return 1 if any(measure.OURS in each.wrong for each in found) else 0


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
    ]
    return sorted(wanted, key=lambda launch: int(launch["axes"]["num_tokens"]))


def _measure_all(
    chosen: Sequence[Mapping[str, Any]],
    kernels: Kernels,
    target: str,
    rate: float,
    generator: torch.Generator,
    replays: int,
) -> Iterator[measure.Measured]:
    for launch in chosen:
        kernel = kernels[recipe_of(measure.specialization_of(launch), target).key].function
        found = measure.measure(launch, kernel, rate, generator, replays)
        print(measure.line(found), flush=True)
        yield found
        torch.cuda.empty_cache()


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


def write(path: Path, head: Mapping[str, Any], found: Sequence[measure.Measured]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": 1, **head, "launches": [each.to_json() for each in found]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bin/bench-kernels", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--m", type=int, nargs="+", default=[8], help="token counts (default: 8)")
    parser.add_argument("--tp", type=int, nargs="+", help="TP sizes (default: all of the pack)")
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel; may be repeated")
    parser.add_argument("--replays", type=int, default=30, help="timed replays of each graph (default: 30)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a new one")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where the result goes")
    parser.add_argument("--commit", default="", help="what the result says it was measured at")
    return parser


if __name__ == "__main__":
    sys.exit(main())
