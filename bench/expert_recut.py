"""`python -m bench.expert_recut`: routed experts cut anew between this machine's GPUs, a process each, over NCCL.

A layer of NVFP4 experts and one of BF16 experts, at Muse Spark Open's widths, laid out as vLLM has them when it has
loaded them with EP = TP; `runtime/expert_tp.py` takes them as it does there. Each rank compares all that it holds, byte
by byte, with its slice of the whole experts. Prints seconds, bytes sent, and the peak of device memory beside what
stays, next to what the memory check allows for it.

With --fault, rank 1 dies or stalls within the second exchange: the others must end with a RankError in bounded time.
Exit status 0 when all is as it must be.
"""

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import machine
from bench.collectives_rank import joined
from bench.rank_group import leave, started
from bench.recut_layers import BF16_LAYER, NVFP4_LAYER, Experts, differing, empty_layer, load
from jitspark.errors import RankError
from jitspark.runtime.expert_tp import STAGING_BYTES, ExpertShares
from jitspark.runtime.ranks import RankGroup

VICTIM, FAULTY_EXCHANGE = 1, 2


class FaultyGroup(RankGroup):
    """Ranks of which this one never comes to an exchange, when all have packed what they send in it."""

    swaps = itertools.count(1)

    def swap(self, received: Tensor, sent: Tensor) -> None:
        if next(self.swaps) == FAULTY_EXCHANGE:
            self.fail()
        super().swap(received, sent)

    def fail(self) -> None:
        time.sleep(600)


class DyingGroup(FaultyGroup):
    def fail(self) -> None:
        os._exit(9)


GROUPS = {None: RankGroup, "die": DyingGroup, "stall": FaultyGroup}


def recut(options: argparse.Namespace, group: RankGroup, device: torch.device) -> list[dict[str, Any]]:
    """Both layers taken and compared: what is told of each."""
    experts = Experts(options.experts, options.hidden, options.width)
    order = (NVFP4_LAYER, BF16_LAYER)
    shares = ExpertShares(experts, order, group, staging_bytes=options.staging_mib << 20)  # type: ignore[arg-type]
    layers = {index: empty_layer(experts, index, group, device) for index in order}
    shares.tap(layers)
    told = []
    for index, layer in layers.items():
        load(layer, index, experts, group, options.seed)
        _synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before, began = _allocated(device), time.perf_counter()
        layer.quant_method.process_weights_after_loading(layer)
        _synchronize(device)
        seconds, peak = time.perf_counter() - began, _allocated(device, peak=True)
        held = sum(tensor.nbytes for tensor in shares.tensors(index).values())
        told.append({
            "layer": "bfloat16" if index == BF16_LAYER else "nvfp4",
            "seconds": seconds,
            "held_bytes": held,
            "sent_bytes": held * (group.size - 1) // group.size,
            "extra_bytes": peak - before - held,
            "allowed_bytes": shares._passing_bytes(shares._form(index)),  # noqa: SLF001 - what the memory check counts
            "wrong": differing(index, experts, group, shares.tensors(index), options.seed),
        })  # fmt: skip
    shares.finish()
    return told


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allocated(device: torch.device, *, peak: bool = False) -> int:
    if device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


def _rank(options: argparse.Namespace) -> int:
    place = joined(options)
    world = dist.group.WORLD
    kind = GROUPS[options.fault if options.rank == VICTIM else None]
    group = kind(options.rank, options.world, world, world, options.patience)
    place.barrier()
    began = time.perf_counter()
    try:
        layers = recut(options, group, place.device)
    except RankError as error:
        said = {"rank": options.rank, "seconds": time.perf_counter() - began, **error.to_json()}
        print(json.dumps(said), flush=True)
        return 3
    print(json.dumps({"rank": options.rank, "layers": layers}), flush=True)
    place.barrier()
    dist.destroy_process_group()
    return 1 if any(each["wrong"] for each in layers) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.rank is not None:
        leave(_rank(options))
    with started("bench.expert_recut", given, options.world) as ranks:
        said, statuses = _outcome(ranks, options)
    about = machine.description(options.commit) if options.device == "cuda" else {}
    found = {"about": about, "experts": options.experts, "fault": options.fault, "statuses": statuses, "ranks": said}
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    others = [each for rank, each in enumerate(said) if rank != VICTIM]
    good = all("error" in each for each in others) if options.fault else not any(statuses)
    print("all right" if good else "NOT all right")
    return 0 if good else 1


def _outcome(ranks: Sequence[Any], options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[int | None]]:
    """What each rank said last, and its status; a rank that stalls is ended when the others have said theirs."""
    said: list[dict[str, Any]] = [{} for _ in ranks]
    waited = [rank for rank in range(options.world) if not (options.fault and rank == VICTIM)]
    for rank in waited:
        for line in ranks[rank].stdout:
            said[rank] |= json.loads(line) if line.startswith("{") else {}
            if said[rank].keys() & {"layers", "error"}:
                break
        told = time.perf_counter()
        ranks[rank].wait(timeout=60)
        said[rank]["ended_after_seconds"] = time.perf_counter() - told
    if options.fault:
        ranks[VICTIM].kill()
        ranks[VICTIM].wait()
    return said, [rank.returncode for rank in ranks]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.expert_recut", description=__doc__)
    parser.add_argument("--experts", type=int, default=32, help="of a layer (default: 32)")
    parser.add_argument("--hidden", type=int, default=4096, help="columns of an expert (default: 4096)")
    parser.add_argument("--width", type=int, default=4096, help="outputs of an expert's FC1 (default: 4096)")
    parser.add_argument("--staging-mib", type=int, default=STAGING_BYTES >> 20, help="for what is sent and received")
    parser.add_argument("--fault", choices=("die", "stall"), help="what rank 1 does within the second exchange")
    parser.add_argument("--world", type=int, default=2, help="ranks (default: 2)")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--same-gpu", action="store_true", help="all ranks on one GPU, over gloo")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds to wait for another rank (default: 60)")
    parser.add_argument("--seed", type=int, default=20260)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--commit", default="")
    parser.set_defaults(replays=1)
    return parser


if __name__ == "__main__":
    sys.exit(main())
