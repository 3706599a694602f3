"""`python -m bench.check_distributed`: whole decode steps of a TP group that exchanges over torch.distributed.

A process and a GPU per rank. Each plan as in bench.check_ranks: launch by launch against its references, from equal
inputs; all ranks' outputs bit for bit alike; captured replays as an eager run. Beside it the same plan over mapped
memory: how many elements of its outputs have other bits, and how long a captured step takes either way.

    python -m bench.check_distributed --cache DIR --make     # compile what it needs, without a GPU
    python -m bench.check_distributed --cache DIR            # exit status 0 when all holds
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from bench import decode_pack
from bench.check_ranks import RankOfPlan
from bench.collectives_rank import Place, joined
from bench.make_pack import build_all
from bench.plan_pack import Packed
from bench.rank_group import leave, started
from jitspark.building.build import wanted_for
from jitspark.building.progress import Wanted
from jitspark.checking.check import default_capture
from jitspark.checking.guarded import bits
from jitspark.checking.packed import load_keys
from jitspark.geometry import DEFAULT_GEOMETRY, Deployment, deployment
from jitspark.plans.backbone import decode_plan
from jitspark.plans.builder import Keys
from jitspark.plans.executor import Executor
from jitspark.plans.plan import Kind
from jitspark.registry import specializations
from jitspark.runtime.distributed_exchanges import gathered_first
from jitspark.runtime.options import TORCH_DISTRIBUTED
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.symmetric_memory import exchange_memory
from jitspark.settings import from_environment
from jitspark.target import TARGETS

COMBINE = "expert_combine_rmsnorm"  # what takes an exchange's place, in no plan of several ranks
TIMED = 100  # replays


class RankOverTorchDistributed(RankOfPlan):
    """A rank whose subject exchanges over torch.distributed; `mapped` is the same plan over mapped memory."""

    def __init__(self, packed: Packed, served: Deployment, kernels: Mapping[Any, Any], place: Place, seed: int) -> None:
        super().__init__(packed, kernels, place, seed)
        self.mapped, plan, world = self.subject, self.plan, dist.group.WORLD
        group = RankGroup(place.group.rank, place.group.size, control=world, data=world)
        memory = exchange_memory([plan], group, place.device, (plan.tp,), exchanges=TORCH_DISTRIBUTED)
        assert memory.gather is not None
        given = [each.name for each in plan.buffers if each.kind in (Kind.INPUT, Kind.WEIGHT, Kind.KV_CACHE)]
        self.subject = Executor(
            plan,
            kernels,
            {name: self.mapped.tensors[name].clone() for name in given},
            place.device,
            numbers=self.numbers,
            symmetric=memory.of(plan),
            instead=gathered_first(plan, served, kernels, memory.gather),
        )

    def check(self, replays: int) -> dict[str, Any]:
        found = super().check(replays)
        if self.mapped is self.subject:
            return found
        ours, over_memory = self.subject, self.mapped
        for plan in (ours, over_memory):
            self.place.barrier()
            plan.run()
        self.place.synchronize()
        unlike = {
            name: int((bits(value) != bits(over_memory.outputs[name])).sum()) for name, value in ours.outputs.items()
        }
        times = {"torch_distributed": self._microseconds(ours.run), "mapped": self._microseconds(over_memory.run)}
        elements = {name: value.numel() for name, value in ours.outputs.items()}
        return {**found, "other_bits": unlike, "of": elements, "us": times, "launches": len(self.plan.launches)}

    def _microseconds(self, run: Callable[[], object]) -> float:
        """Of a captured step, the median of replays that begin together."""
        replay = default_capture(self.place.device)(run)
        spans = []
        for _ in range(TIMED):
            begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.place.barrier()
            begun.record()
            replay()
            done.record()
            self.place.synchronize()
            spans.append(begun.elapsed_time(done) * 1e3)
        return round(statistics.median(spans), 1)


def deployments(tp: int) -> Iterator[tuple[Deployment, int]]:
    """What is checked, with rows: a tiny model, and the first layers of the real one whether served at `tp` or not."""
    yield deployment("tiny_swa", tp), 8
    yield deployment("tiny_swa", tp), 64
    whole = deployment(DEFAULT_GEOMETRY, 8)
    yield decode_pack.slice_of(msgspec.structs.replace(whole, tp=tp), decode_pack.SLICE), 8


def packed_of(served: Deployment, rows: int, target: str) -> Packed:
    plan = decode_plan(served, rows, target, keys=Keys(target))
    return Packed(plan, {"geometry": served.backbone.name, "layers": served.backbone.num_hidden_layers})


def wanted_by(served: Deployment, packed: Packed) -> list[Wanted]:
    keys = set(packed.plan.keys())
    asked = wanted_for(specializations(served), [packed.plan.target])
    return [each for each in asked if each.key in keys or each.key.kernel == COMBINE]


def make(options: argparse.Namespace) -> int:
    settings = replace(from_environment(), cache_dir=options.cache)
    asked = [wanted_by(served, packed_of(served, rows, options.target)) for served, rows in deployments(options.world)]
    wanted = list({each.key: each for listed in asked for each in listed}.values())
    print(f"{len(build_all(wanted, settings))} entries")
    return 0


def _rank(options: argparse.Namespace) -> int:
    place, good = joined(options), True
    for served, rows in deployments(options.world):
        packed = packed_of(served, rows, options.target)
        kernels = load_keys(options.cache, [each.key for each in wanted_by(served, packed)])
        found = RankOverTorchDistributed(packed, served, kernels, place, options.seed).check(options.replays)
        good &= not found["problems"]
        if options.rank == 0 or found["problems"]:
            print(f"rank {options.rank}: {json.dumps(found)}", flush=True)
        torch.cuda.empty_cache()
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return 0 if good else 1


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.make:
        return make(options)
    if options.rank is not None:
        leave(_rank(options))
    with started("bench.check_distributed", given, options.world, stdout=None) as ranks:
        status = max(rank.wait() for rank in ranks)
    print("all passed" if status == 0 else "NOT all passed")
    return status


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m bench.check_distributed", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("--cache", type=Path, required=True, metavar="DIR")
    made.add_argument("--make", action="store_true", help="compile into the cache, and check nothing")
    made.add_argument("--target", choices=TARGETS, default="sm_90a")
    made.add_argument("--world", type=int, default=2, help="ranks (default: 2)")
    made.add_argument("--rank", type=int)
    made.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()) / "store", help="a new file")
    made.add_argument("--replays", type=int, default=100, help="of the captured step (default: 100)")
    made.add_argument("--patience", type=float, default=60.0, help="seconds to wait for another rank (default: 60)")
    made.add_argument("--seed", type=int, default=20260, help="of weights and inputs")
    made.set_defaults(device="cuda", same_gpu=False)
    return made


if __name__ == "__main__":
    sys.exit(main())
