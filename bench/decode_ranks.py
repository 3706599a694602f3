"""`bin/bench-decode-ranks`: a decode step of a whole TP group, a process and a GPU of this machine per rank.

Random weights at the real sizes, each rank its own shares; every layer routes to as many distinct experts as asked.
Captured on every rank: our step with fused exchanges, the same with exchanges that reach this rank alone, the same over
NCCL, and that of vLLM's kernels over NCCL; with a slice of every expert on each rank, and with whole experts. All ranks
begin a span of replays together, and the slowest one's time counts. Ranks' outputs must have the same bits over many
replays. From a pack of `python -m bench.decode_ranks_pack`, which all ranks read and none writes. Writes
bench/results/tp<N>_<gpu>_<commit or date>.json. Exit status 0 when all was right. With `--alone` one rank of the group
on one GPU, as bin/bench-decode has it: with whole experts the busiest of each layer, for which the others would wait.
"""

import argparse
import contextlib
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import machine, packed_cache
from bench.decode import RESULTS, UNIFORM, Point, write
from bench.expert_parallel import SLICES, WHOLE
from bench.nccl_exchanges import NCCL, STOCK
from bench.rank_group import leave, started

LEFT_S = 20.0  # what the others have to end, once one has failed


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    if options.rank is not None:
        leave(_rank(options))
    if options.alone:
        with packed_cache.cache_root(options) as root:
            options.root, options.rank = root, 0
            return _rank(options)
    with (
        packed_cache.cache_root(options) as root,
        started("bench.decode_ranks", [*given, "--root", str(root)], options.world, stdout=None) as ranks,
    ):
        status = wait(ranks, options.limit)
    print("all right" if status == 0 else "NOT all right")
    return status


def wait(ranks: Sequence["subprocess.Popen[str]"], limit: float) -> int:
    """The first exit status that is not 0, or 0. All are ended `LEFT_S` after one failed, and after `limit` seconds."""
    end, status = time.monotonic() + limit, 0
    while None in [rank.poll() for rank in ranks]:
        if time.monotonic() > end:
            status = status or 1
            for rank in ranks:
                rank.kill()
        failed = next((rank.returncode for rank in ranks if rank.returncode), 0)
        if failed and not status:
            status, end = failed, min(end, time.monotonic() + LEFT_S)
        time.sleep(0.1)
    return status or next((rank.returncode for rank in ranks if rank.returncode), 0)


def points(options: argparse.Namespace) -> list[Point]:
    """Every number of rows with every context; experts as asked, or as many as random choices come to."""
    made = itertools.product(options.m, options.ctx)
    asked = [Point(rows, ctx, options.distinct_experts or UNIFORM[rows]) for rows, ctx in made]
    fewer = [Point(rows, options.ctx[0], each) for rows in options.m for each in options.also_distinct]
    return list(dict.fromkeys((*asked, *fewer)))


def _rank(options: argparse.Namespace) -> int:
    import torch.distributed as dist

    from bench.collectives_rank import joined
    from bench.decode_rank import Loaded, Rank, alone, head
    from jitspark.errors import JitsparkError

    place = alone(options) if options.alone else joined(options)
    try:
        loaded = Loaded.read(options.root, options)
    except JitsparkError as error:
        print(f"bench-decode-ranks: rank {options.rank}: {error}", file=sys.stderr)
        return error.exit_code
    about = head(loaded, place, options)
    kind = f"tp{options.world}{'_one_rank' if options.alone else ''}"
    path = options.out / f"{machine.file_stem(kind, about['about'])}.json"
    done: list[dict[str, Any]] = []
    for found in _measured(
        lambda experts: Rank(loaded, experts, place, options), about["read_tb_per_s"] * 1e6, options
    ):
        done.append(found)
        if options.rank == 0:
            print(line(found), flush=True)
            write(path, about, done)  # what was measured before an interrupt or a fault is kept
    if not options.alone:
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()
    return 1 if any(each["problems"] for each in done) else 0


def _measured(make: Any, rate: float, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One way of dealing out experts after the other: a GPU need not hold both. Each M's first point in detail."""
    for experts in options.experts:
        rank, seen = make(experts), set()
        for point in points(options):
            if not rank.fits(point):
                if options.rank == 0:
                    print(f"{experts}: {point} does not fit into the GPUs' memory: left out", flush=True)
                continue
            yield rank.measure(point, rate, details=point.rows not in seen)
            seen.add(point.rows)
        rank.release()
        del rank
        free()


def free() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


def line(found: Mapping[str, Any]) -> str:
    point, timings = found["point"], found["timings"]
    times = ", ".join(f"{name} {each['median_us'] / 1e3:.3f}" for name, each in timings.items())
    place = f"{found['experts']}: M = {point['rows']}, ctx {point['context']}, D = {point['distinct']}"
    busiest = "" if found["busiest_experts"] is None else f", busiest rank {found['busiest_experts']:.1f} experts"
    return f"{place}{busiest}: floor {found['floor_us'] / 1e3:.3f} ms; {times} {' '.join(found['problems'])}"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="bin/bench-decode-ranks", description=__doc__)
    packed_cache.add_arguments(made)
    made.add_argument("--world", type=int, required=True, help="ranks, each with a GPU")
    made.add_argument("--alone", action="store_true", help="one of these ranks on one GPU, which exchanges with itself")
    made.add_argument("--m", type=int, nargs="+", default=[8, 16, 32, 64], help="rows (default: 8 16 32 64)")
    made.add_argument("--ctx", type=int, nargs="+", default=[32768, 2048, 131072], help="tokens of each request")
    made.add_argument("--distinct-experts", type=int, help="of each layer (default: what random choices come to)")
    made.add_argument("--also-distinct", type=int, nargs="*", default=[], help="also so many, at the first context")
    made.add_argument("--experts", nargs="+", choices=[SLICES, WHOLE], default=[SLICES, WHOLE])
    made.add_argument("--provider", nargs="*", choices=[NCCL, STOCK], default=[NCCL, STOCK], help="beside ours")
    made.add_argument("--equal-replays", type=int, default=1000, help="whose bits are compared (default: 1000)")
    made.add_argument("--limit", type=float, default=1800.0, help="seconds that the ranks have (default: 1800)")
    made.add_argument("--patience", type=float, default=120.0, help="seconds to wait for another rank (default: 120)")
    machine.add_arguments(made, RESULTS)
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    made.set_defaults(device="cuda", same_gpu=False)
    return made


if __name__ == "__main__":
    sys.exit(main())
