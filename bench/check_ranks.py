"""`python -m bench.check_ranks`: whole decode steps of a TP group, a process and a GPU per rank.

From a pack of `python -m bench.ranks_pack`. Each plan: launch by launch against its references, which exchange over
torch.distributed, from equal inputs; all ranks' outputs bit for bit alike; captured replays as an eager run. Ranks have
the same weights where a layer has them whole, and other ones where they hold shares. Exit status 0 when all holds.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import packed_cache
from bench.collectives_rank import Place, joined
from bench.plan_pack import Packed, load_plan_kernels, read_plans
from bench.rank_group import leave, started
from jitspark.checking.check import default_capture
from jitspark.checking.compare import differing
from jitspark.checking.guarded import bits
from jitspark.checking.plan_arguments import Tensors, random_step, random_weights
from jitspark.checking.plan_compare import compare_runs, poison
from jitspark.peer_memory import map_peers
from jitspark.plans.binding import SymmetricMemory, local_memory
from jitspark.plans.bound_plan import BLOCK_SIZE, BoundPlan
from jitspark.plans.executor import Executor
from jitspark.plans.plan import Plan, TensorArgument
from jitspark.plans.reference_executor import ReferenceExecutor, argument_names
from jitspark.target import target_of_capability

LENGTHS = (1000, 72, 8, 71, 2056, 73, 0, 2055)  # of requests in turn
TIMEOUT_US = 10_000_000
SHARED_OUT = (  # operations whose weights are shares
    "skinny_gemm_bf16",
    "router_pooler_gemm",
    "bf16_grouped_gemm_swiglu",
    "bf16_grouped_gemm_partial",
    "nvfp4_grouped_gemm_swiglu",
    "nvfp4_grouped_gemm_partial",
)
SHARES = ("weight", "weight_scales", "pooler")  # their names as arguments


class RankOfPlan:
    """One rank's executor of a plan, and the references beside it."""

    def __init__(self, packed: Packed, kernels: Mapping[Any, Any], place: Place, seed: int) -> None:
        self.plan, self.place, self.title = packed.plan, place, packed.title
        generator = torch.Generator(device=place.device).manual_seed(seed)
        requests = self.plan.rows // self.plan.query_length
        lengths = [LENGTHS[i % len(LENGTHS)] for i in range(requests)]
        weights = random_weights(self.plan, generator, max_positions=max(BLOCK_SIZE, *lengths))
        weights = own_shares(self.plan, weights, place.group.rank)
        step = random_step(self.plan, lengths, generator)
        self.numbers = {"rank": place.group.rank, "timeout_us": TIMEOUT_US}

        def bound() -> Tensors:
            return {**weights, **_copies(step.inputs), **_copies(step.kv_caches)}

        local = local_memory(self.plan, place.device)
        self.reference: BoundPlan = self._references(bound(), local)
        self.memory = self._mapped()
        self.subject: BoundPlan = (
            self._references(bound(), local_memory(self.plan, place.device))
            if place.device.type == "cpu"
            else Executor(self.plan, kernels, bound(), place.device, numbers=self.numbers, symmetric=self.memory)
        )

    def _references(self, bound: Tensors, symmetric: SymmetricMemory) -> ReferenceExecutor:
        gather, device = self.place.group.gather, self.place.device
        return ReferenceExecutor(self.plan, bound, device, gather=gather, numbers=self.numbers, symmetric=symmetric)

    def _mapped(self) -> SymmetricMemory | None:
        if self.place.device.type == "cpu":
            return None
        found = map_peers(self.plan.symmetric_bytes, self.place.group.process_group, self.place.device)
        found[0].zero_()
        self.place.barrier()
        return SymmetricMemory(*found)

    def check(self, replays: int) -> dict[str, Any]:
        problems, margins = self._launch_by_launch()
        problems += self._unlike()
        problems += self._replayed(replays)
        words = [name for name, each in self.subject.tensors.items() if name.endswith("failure") and bool(each.any())]
        return {"plan": self.title, "problems": problems + words, "margins": margins}

    def _launch_by_launch(self) -> tuple[list[str], dict[str, float]]:
        problems: list[str] = []
        margins: dict[str, float] = {}
        for judged in compare_runs(self.subject, self.reference):
            operation = judged.launch.operation
            problems += [f"{judged.launch.name} ({operation}): {text}" for text in judged.problems]
            worst = max((each.margin for each in judged.comparisons), default=0.0)
            margins[operation] = max(margins.get(operation, 0.0), worst)
            self.place.barrier()  # nobody sends for the next exchange into what another rank still looks at
        wrong = [name for name, each in self.subject.outputs.items() if not bool(each.isfinite().all())]
        return problems + [f"{name} is not finite" for name in wrong], margins

    def _unlike(self) -> list[str]:
        """Outputs that have other bits on another rank."""
        unlike = []
        for name, value in self.subject.outputs.items():
            every = self.place.group.gather(bits(value).to(torch.int64).flatten())
            if bool((every != every[0]).any()):
                unlike.append(f"{name} differs between ranks")
        return unlike

    def _replayed(self, replays: int) -> list[str]:
        eager = self._run(self.subject.run)
        replay = default_capture(self.place.device)(self.subject.run)
        problems = []
        for number in range(replays):
            found = self._run(replay) if number in (0, replays - 1) else self._again(replay)
            problems += [
                f"replay {number}: {name}: {text}"
                for name, wanted in eager.items()
                if found and (text := differing(found[name], wanted)) is not None
            ]
        return problems

    def _run(self, run: Callable[[], object]) -> Tensors:
        poison(self.subject)
        for tensor in self.subject.outputs.values():
            tensor.zero_()
        self.place.barrier()
        run()
        self.place.synchronize()
        caches = {name: each for name, each in self.subject.tensors.items() if name.endswith("kv_cache")}
        return _copies({**self.subject.outputs, **caches})

    @staticmethod
    def _again(replay: Callable[[], object]) -> Tensors:
        replay()
        return {}


def own_shares(plan: Plan, weights: Tensors, rank: int) -> Tensors:
    """Other shares on each rank: those of rank 0, their rows turned by `rank`."""
    shared_out = {
        argument.buffer
        for launch in plan.launches
        if launch.operation in SHARED_OUT
        for argument, name in zip(launch.arguments, argument_names(launch), strict=True)
        if isinstance(argument, TensorArgument) and name in SHARES and argument.buffer in weights
    }
    return {name: each.roll(rank, 0) if rank and name in shared_out else each for name, each in weights.items()}


def _copies(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def check_all(options: argparse.Namespace, place: Place) -> Iterator[dict[str, Any]]:
    on_gpu = place.device.type == "cuda"
    target = target_of_capability(*torch.cuda.get_device_capability(place.device)) if on_gpu else "sm_90a"
    assert target is not None
    with packed_cache.cache_root(options) as root:
        plans = [each for each in read_plans(root, "ranks", target) if each.plan.tp == place.group.size]
        kernels = load_plan_kernels(root, plans) if on_gpu else {}
    for packed in plans if on_gpu else plans[:1]:
        yield RankOfPlan(packed, kernels, place, options.seed).check(options.replays)
        if on_gpu:
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(given)
    if options.rank is not None:
        leave(_rank(options))
    with started("bench.check_ranks", given, options.world, stdout=None) as ranks:
        status = max(rank.wait() for rank in ranks)
    print("all passed" if status == 0 else "NOT all passed")
    return status


def _rank(options: argparse.Namespace) -> int:
    place = joined(options)
    good = True
    for found in check_all(options, place):
        good &= not found["problems"]
        if options.rank == 0 or found["problems"]:
            print(f"rank {options.rank}: {json.dumps(found)}", flush=True)
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
    return 0 if good else 1


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m bench.check_ranks", description=__doc__)
    packed_cache.add_arguments(made)
    made.add_argument("--world", type=int, default=2, help="ranks (default: 2)")
    made.add_argument("--rank", type=int)
    made.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()) / "store", help="a new file")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--same-gpu", action="store_true", help="all ranks on one GPU")
    made.add_argument("--replays", type=int, default=200, help="replays of the captured step (default: 200)")
    made.add_argument("--patience", type=float, default=60.0, help="seconds to wait for another rank (default: 60)")
    made.add_argument("--seed", type=int, default=20260, help="of weights and inputs")
    return made


if __name__ == "__main__":
    sys.exit(main())
