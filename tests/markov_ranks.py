"""Ranks as processes that sample over their vocabulary shards, through gloo.

    python tests/markov_ranks.py RANK SIZE FOLDER

Writes FOLDER/RANK.pt: the tokens and the cache that this rank ends with.
"""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from markov_draws import inputs

from jitspark.runtime.markov_reference import ReferenceLoop
from jitspark.runtime.ranks import RankGroup

SIZES = {"requests": 5, "states": 7, "vocab": 1600, "rank": 64}


def sample(ranks):
    """Tokens and cache of one rank: of the whole vocabulary for one alone."""
    given = inputs(**SIZES)
    rows = SIZES["vocab"] // ranks.size
    shard = slice(ranks.rank * rows, (ranks.rank + 1) * rows)
    loop = ReferenceLoop(given.lm_head[shard], given.markov_w1, given.markov_w2[shard], shard.start, 0.25, 20.0, ranks)
    loop.run(given.hidden, given.draft_tokens, given.draft_logits, **given.step)
    return given.draft_tokens, given.draft_logits


def run_ranks(folder, size):
    """(tokens, cache) of each rank, in rank order."""
    made = [subprocess.Popen([sys.executable, __file__, str(rank), str(size), str(folder)]) for rank in range(size)]
    try:
        assert [process.wait(timeout=180) for process in made] == [0] * size
    finally:
        for process in made:
            process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(size)]


def main(rank, size, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=120)
    )
    world = dist.group.WORLD
    torch.save(sample(RankGroup(rank=rank, size=size, control=world, data=world)), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
