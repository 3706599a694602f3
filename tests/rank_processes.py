"""Ranks as processes of one script, over gloo: what starts them all, and what each of them does around its work.

The script is one process that imports and draws what all ranks need, and is then forked into them.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from bench.rank_group import leave
from jitspark.runtime.ranks import RankGroup

ROOT = Path(__file__).resolve().parents[1]
# Seconds that one rank is waited for by another, and all of them by a test: a slow machine never takes as long.
PATIENCE = 1200.0
# Ranks of one machine need neither its name nor its network; bench is not installed.
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}


def run_ranks(script, folder, size, *arguments):
    """What each rank of `script ARGUMENTS SIZE FOLDER` wrote, in rank order."""
    command = [sys.executable, script, *arguments, str(size), str(folder)]
    subprocess.run(command, env={**os.environ, **ENVIRONMENT}, check=True, timeout=PATIENCE)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def run_on_vllm(script, folder, *arguments):
    """What each of two ranks of `script RANK MEETING OWN ARGUMENTS` says last, as JSON.

    MEETING is the file by which vLLM's ranks find each other, OWN a folder of each rank's.
    """
    command, environment = [sys.executable, "-P", str(script)], {**os.environ, **ENVIRONMENT}
    started = []
    try:
        for rank in "01":
            (folder / rank).mkdir()
            words = [rank, str(folder / "meeting"), str(folder / rank), *map(str, arguments)]
            started.append(subprocess.Popen([*command, *words], stdout=subprocess.PIPE, text=True, env=environment))
        said = [process.communicate(timeout=PATIENCE)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in said]


def forked(work):
    """The id of a child that does `work` and ends, with this process at the latest. To be called before torch has
    started a thread: with one thread to compute with, it starts none."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # die with the parent
        if os.getppid() == parent:
            work()
            status = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the log tells it and the status says so
        traceback.print_exc()
    finally:
        leave(status)


def join(folder, rank, size, *, patience=PATIENCE):
    """The group of ranks, which find each other by a file in `folder`, when all of them are connected.

    A rank that left while others still connect would fail these within torch, outside of what is tested.
    """
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )
    dist.barrier()
    return RankGroup(rank, size, dist.group.WORLD, dist.group.WORLD, patience=patience)


def answer_as_ranks(work, size, folder):
    """Fork into ranks, each of which writes FOLDER/RANK.pt: what `work` makes of its group. Returns when all have."""
    torch.set_num_threads(1)

    def rank_alone(rank):
        torch.save(work(join(folder, rank, size)), Path(folder) / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()

    for rank in range(size):
        forked(lambda rank=rank: rank_alone(rank))
    for _ in range(size):
        _, status = os.wait()
        if status:
            sys.exit("a rank has failed")  # and ends the others, which would wait for it
