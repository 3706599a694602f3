"""Ranks as processes of one script, over gloo: what starts them all, and what each of them does around its work."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from jitspark.runtime.ranks import RankGroup

ROOT = Path(__file__).resolve().parents[1]


def run_ranks(script, folder, size, *arguments, patience=240):
    """What each rank of `script ARGUMENTS RANK SIZE FOLDER` wrote, in rank order; `patience` in seconds."""
    command = [sys.executable, script, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}  # bench is not installed
    made = [subprocess.Popen([*command, str(rank), str(size), str(folder)], env=environment) for rank in range(size)]
    try:
        assert [process.wait(timeout=patience) for process in made] == [0] * size
    finally:
        for process in made:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def write_answer(work, rank, size, folder, **options):
    """Within a rank: write what `work` makes of its group, and leave when all have. `options` are RankGroup's."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    group = RankGroup(rank=rank, size=size, control=dist.group.WORLD, data=dist.group.WORLD, **options)
    torch.save(work(group), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
