"""Ranks as processes that re-cut the experts of a checkpoint, each compared with a direct slice of the file.

    python tests/expert_ranks.py TASK.json

TASK: path, experts (fields), layers, ranks, and where wanted maker (a module whose `join`, `empty_layer` and `load`
take the place of those here), sharded (how vLLM shares experts: "ep" or "tp"), staging_bytes (or one for each rank),
free_bytes, lacks (a tensor the checkpoint does not have), may_give_up, fault. Prints a line of JSON per rank: what
differs, and memory in bytes (`extra`: the peak beside what stays).
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import expert_checkpoint
import rank_processes
import torch
import torch.distributed as dist

from jitspark.errors import JitsparkError
from jitspark.runtime import expert_tp
from jitspark.runtime.ranks import RankGroup

TESTS = Path(__file__).resolve().parent
PASSED_ON = ("PATH", "HF_HUB_OFFLINE", "VLLM_CACHE_ROOT", "VLLM_NO_USAGE_STATS")
# Seconds for all ranks together: less than one of them waits for another, so whoever waits in vain is noticed.
LIMIT = rank_processes.PATIENCE / 2


class StockMethod:
    """In the place of vLLM's method: it only spoils the checkpoint's order, as that does."""

    def __init__(self, fault=None):
        self.fault = fault

    def process_weights_after_loading(self, layer):
        if self.fault is not None:
            self.fault()
        for name in ("w13_weight", "w2_weight"):
            getattr(layer, name).data.view(torch.uint8).zero_()


class MuseSparkModelOptNvFp4FusedMoE(StockMethod):
    pass


class MuseSparkUnquantizedFusedMoE(StockMethod):
    pass


def empty_layer(experts, index, *, rank=0, ranks=1, sharded="ep", fault=None):
    """A layer as vLLM makes it before it loads anything, with the attributes that are read."""
    count, inner = experts.num_local_experts, experts.moe_intermediate_size
    hidden, is_nvfp4, ep = experts.moe_hidden_size, experts.is_nvfp4(index), sharded == "ep" and ranks > 1
    here, inner = (count // ranks, inner) if ep else (count, inner // ranks)
    parallel = SimpleNamespace(
        enable_eplb=False,
        use_ep=ep,
        ep_size=ranks if ep else 1,
        ep_rank=rank if ep else 0,
        tp_size=1 if ep else ranks,
        tp_rank=0 if ep else rank,
    )
    shapes = expert_checkpoint.Experts(here, hidden, inner, "nvfp4" if is_nvfp4 else "bfloat16")
    make = expert_checkpoint.nvfp4 if is_nvfp4 else expert_checkpoint.bfloat16
    tensors = make(shapes, torch.Generator().manual_seed(7))
    if is_nvfp4:  # vLLM keeps the input scales of all experts on every rank
        tensors |= {"w13_input_scale": torch.ones(count, 2), "w2_input_scale": torch.ones(count)}
    method = MuseSparkModelOptNvFp4FusedMoE if is_nvfp4 else MuseSparkUnquantizedFusedMoE
    return SimpleNamespace(
        quant_method=method(fault),
        moe_config=SimpleNamespace(moe_parallel_config=parallel),
        expert_placement_strategy="linear",
        **{name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()},
    )


def load(layer, path, index, lacks=None):
    """This rank's experts from the file into the layer, as its parallel config says."""
    parallel, here = layer.moe_config.moe_parallel_config, len(layer.w13_weight)
    share = (parallel.tp_rank, parallel.tp_size)
    experts = slice(parallel.ep_rank * here, (parallel.ep_rank + 1) * here)
    found = expert_checkpoint.read(path, index, experts=experts, rows=share, columns=share)
    found |= {n: t for n, t in expert_checkpoint.read(path, index).items() if n.endswith("input_scale")}
    for name, tensor in found.items():
        if name != lacks:
            getattr(layer, name).data.copy_(tensor)


def join(task, rank):
    """The group of ranks, which find each other by a file."""
    return rank_processes.join(task["folder"], rank, task["ranks"])


def run(task, rank, maker):
    """One rank. Returns what is printed."""
    ranks, experts = task["ranks"], expert_checkpoint.Experts(**task["experts"])
    group = maker.join(task, rank)
    dist.barrier()  # in groups of vLLM's too, all are connected before one may fail and leave
    if stalled(task) is not None:
        group = PatientWithOthers(rank, ranks, group.control, group.data, patience=1.0)
        PatientWithOthers.silent = stalled(task)
    options = {"staging_bytes": task["staging_bytes"]} if "staging_bytes" in task else {}
    if isinstance(task.get("staging_bytes"), list):
        options["staging_bytes"] = task["staging_bytes"][rank]
    options["may_give_up"] = task.get("may_give_up", False)
    if "free_bytes" in task:
        options["free_bytes"] = lambda _: task["free_bytes"][rank]
    shares = expert_tp.ExpertShares(experts, task["layers"], group, **options)
    fault = Fault(task.get("fault"), rank)
    layers = {
        index: maker.empty_layer(
            experts, index, rank=rank, ranks=ranks, sharded=task.get("sharded", "ep"), fault=fault.of_stock(index)
        )
        for index in task["layers"]
    }
    shares.tap(layers)
    for index, layer in layers.items():
        maker.load(layer, task["path"], index, task.get("lacks"))
    fault.arm()
    allocated = expert_tp._allocated
    expert_tp._allocated = lambda *form: {name: tensor.fill_(1) for name, tensor in allocated(*form).items()}  # touched
    held_before = memory()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts here
    for layer in layers.values():
        layer.quant_method.process_weights_after_loading(layer)
    if not shares.finish():
        stock = [index for index, layer in layers.items() if not layer.w2_weight.view(torch.uint8).any()]
        return {"given_up": True, "stock": stock, "held": len(shares._held)}
    peak = memory("VmHWM")
    held = sum(tensor.nbytes for index in task["layers"] for tensor in shares.tensors(index).values())
    wrong = {
        index: found
        for index in task["layers"]
        if (found := expert_checkpoint.differing(task["path"], index, rank, ranks, shares.tensors(index)))
    }
    return {
        "wrong": wrong,
        "held": held,
        "extra": peak - held_before - held,
        "needed": shares.needed_bytes(),
    }


def memory(field="VmRSS"):
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


class PatientWithOthers(RankGroup):
    """Waits `patience` seconds for the rank that stalls in packing, once it has the others' words, and for these as
    long as they take: what is late on a slow machine is not silent. (A wait that gloo gives up fails all others.)
    """

    silent, step, works = None, "", {}

    def _words(self, step, *told, **options):
        PatientWithOthers.step, PatientWithOthers.works = step, {}
        return super()._words(step, *told, **options)

    def _started(self, silent, rank, *how, **peer):
        work = super()._started(silent, rank, *how, **peer)
        self.works[id(work)] = (rank, work)
        return work

    def _waited(self, silent, rank, work, deadline):
        if rank != self.silent or not self.step.endswith("packing"):
            return self._waited_once(silent, rank, work, deadline)
        for other, its in list(self.works.values()):
            if other != self.silent:
                self._waited_once(silent, other, its, deadline)
        return super()._waited(silent, rank, work, time.monotonic() + self.patience)

    def _waited_once(self, silent, rank, work, deadline):
        if self.works.pop(id(work), None) is not None:
            super()._waited(silent, rank, work, deadline + rank_processes.PATIENCE)


class Fault:
    """{"rank", "how": raise, die, stall or stock, "at": the exchange, or the layer's index for "stock"}."""

    def __init__(self, task, rank):
        self.task = task if task is not None and task["rank"] == rank else None
        self.calls = 0

    def of_stock(self, index):
        if self.task is None or self.task["how"] != "stock" or self.task["at"] != index:
            return None
        return self.strike

    def arm(self):
        if self.task is None or self.task["how"] == "stock":
            return
        packed = expert_tp._packed

        def faulty(*arguments):
            self.calls += 1
            if self.calls == self.task["at"]:
                self.strike()
            return packed(*arguments)

        expert_tp._packed = faulty

    def strike(self):
        if self.task["how"] == "die":
            os._exit(9)
        if self.task["how"] == "stall":
            time.sleep(LIMIT)
        raise RuntimeError("the allocator has no more memory\nand says so at length")


def stalled(task):
    """The rank that stalls, if any."""
    fault = task.get("fault", {})
    return fault["rank"] if fault.get("how") == "stall" else None


def told(task, rank, maker):
    try:
        said = run(task, rank, maker)
    except JitsparkError as error:
        said = error.to_json()
    except RuntimeError as error:
        said = {"error": "RuntimeError", "found": str(error)}
    os.write(1, (json.dumps(said | {"rank": rank}) + "\n").encode())


def main():
    """One import of torch for all ranks. One that stalls ends when the others have."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    maker = importlib.import_module(task.get("maker", "expert_ranks"))
    torch.set_num_threads(1)
    pids = [rank_processes.forked(lambda rank=rank: told(task, rank, maker)) for rank in range(task["ranks"])]
    for rank, pid in enumerate(pids):
        if rank != stalled(task):
            os.waitpid(pid, 0)


def run_ranks(folder, task):
    """What each rank said, in rank order, of those that lived to say it."""
    meeting = tempfile.mkdtemp(dir=folder)  # ranks of an earlier call never come there
    file = Path(meeting) / "task.json"
    file.write_text(json.dumps({**task, "folder": meeting}), encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if name in PASSED_ON},
        **rank_processes.ENVIRONMENT,
        "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # so that what is freed shows
    }
    ran = subprocess.run(
        [sys.executable, "-P", __file__, file], env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT
    )
    assert ran.returncode == 0
    return sorted((json.loads(line) for line in ran.stdout.splitlines()), key=lambda said: said["rank"])


if __name__ == "__main__":
    main()
