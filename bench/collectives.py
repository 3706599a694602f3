"""`bin/bench-collectives`: the exchanges between ranks, on as many GPUs of this machine, beside NCCL and torch's own.

First each is checked: against its reference, the ranks' bits against each other, and thousands of graph replays against
the first. Then it is timed in CUDA graphs of 200 launches, M rows each: the fused kernel, NCCL or torch's one-shot
all-reduce alone, the norm alone, and both one after the other; median (10th to 90th percentile) in us. Prints a table
and writes bench/results/collectives_<gpu>_<commit or date>.json. Exit status 0 when all was right.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench import collectives_rank, machine
from bench.rank_group import started


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    found, status = _run(given, options)
    if options.device == "cuda":
        about = machine.description(options.commit)
        path = options.out / f"{machine.file_stem('collectives', about)}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": 1, "about": about, "ranks": options.world, "same_gpu": options.same_gpu, "cases": found}
        path.write_text(json.dumps(content, indent=1) + "\n")
        print(path)
    print("all right" if status == 0 else "NOT all right")
    return status


def _run(given: Sequence[str], options: argparse.Namespace) -> tuple[list[dict[str, Any]], int]:
    """What rank 0 found, printed as it comes, and the first exit status of a rank that is not 0."""
    with started("bench.collectives_rank", given, options.world) as ranks:
        first = [_told(each) for each in _findings(ranks[0].stdout or ())]
        others = [list(_findings(rank.communicate()[0].splitlines())) for rank in ranks[1:]]
        ranks[0].wait()
    status = next((rank.returncode for rank in ranks if rank.returncode), 0)
    problems = [_told(each) for rank in others for each in rank if each["problems"]]
    return [*first, *problems], status


def _findings(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    return (json.loads(each) for each in lines if each.startswith("{"))


def _told(found: dict[str, Any]) -> dict[str, Any]:
    print(line(found), flush=True)
    return found


def line(found: dict[str, Any]) -> str:
    """A case: whether it was right, and microseconds by who did it."""
    name = f"{found['kernel']:<47} M={found['num_tokens']:<3}"
    if found["problems"]:
        return "\n      ".join([f"WRONG {name}", *found["problems"]])
    times = "  ".join(f"{who} {us[0]:.2f} ({us[1]:.2f}-{us[2]:.2f})" for who, us in found.get("us", {}).items())
    return f"right {name} margin {found['margin']:.3f}, {found['exchanges']} exchanges  {times}"


def _parser() -> argparse.ArgumentParser:
    parser = collectives_rank.parser()
    parser.prog, parser.description = "bin/bench-collectives", __doc__
    return parser


if __name__ == "__main__":
    sys.exit(main())
