"""One plain launch of a few cases of each kernel, the smallest first, to be run under NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck --kernel-name kns=cutlass python -m bench.sanitize --pack kernels.tar

No reference, no graph, arguments drawn on the CPU: the tool slows kernels down a hundredfold, so only ours should run.
Prints each case before its launch, so that the tool's reports can be told apart: `bench.sanitizer` runs it and does.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence

import torch

from bench import machine, packed_cache
from bench.check import Work, every_case
from jitspark.checking.arguments import allocate, draw_arguments, shape_of, tensor_args, torch_dtype
from jitspark.checking.check import case_title
from jitspark.checking.packed import load_kernels
from jitspark.errors import JitsparkError
from jitspark.key import recipe_of


def smallest(work: Sequence[Work], count: int) -> list[Work]:
    """Of each kernel `count` cases: the one with the fewest bytes, then those with the most other statics."""
    chosen = []
    for name in dict.fromkeys(item.specialization.name for item in work):
        mine = sorted((item for item in work if item.specialization.name == name), key=_bytes)
        statics = mine[0].specialization.statics
        chosen += [mine[0], *sorted(mine[1:], key=lambda item: -_differing(item, statics))][:count]
    return chosen


def _differing(item: Work, statics: Mapping[str, object]) -> int:
    """How many statics differ: Python sorts stably, so of equal cases the smallest is first."""
    return sum(item.specialization.statics[name] != value for name, value in statics.items())


def _bytes(item: Work) -> int:
    total = 0
    for arg in tensor_args(item.specialization):
        elements = 1
        for size in shape_of(item.specialization, arg, item.case.axes):
            elements *= size
        total += elements * torch_dtype(item.specialization, arg).itemsize
    return total


def launch_all(options: argparse.Namespace) -> int:
    target = machine.own_target()
    work = smallest(every_case(target, options.kernel), options.cases)
    with packed_cache.cache_root(options) as root:
        kernels = load_kernels(root, [item.specialization for item in work], target)
    generator = torch.Generator().manual_seed(options.seed)
    for item in work:
        print(f"== {case_title(item.specialization, item.case.axes)}", flush=True)
        draw = draw_arguments(item.specialization, item.case.axes, generator)
        arguments = allocate(item.specialization, item.case.axes, draw, torch.device("cuda"))
        arguments.fill(draw)
        torch.cuda.synchronize()
        kernels[recipe_of(item.specialization, target).key].function(*arguments.values())
        torch.cuda.synchronize()
    print(f"{len(work)} cases were launched")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sanitize", description=__doc__)
    packed_cache.add_arguments(parser)
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel; may be repeated")
    parser.add_argument("--cases", type=int, default=1, help="of each kernel (default: 1)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a new one")
    try:
        return launch_all(parser.parse_args(arguments))
    except JitsparkError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
