"""Ranks as processes that sample over their vocabulary shards, through gloo.

    python tests/markov_ranks.py SIZE FOLDER

Each rank writes FOLDER/RANK.pt: the tokens and the cache that it ends with.
"""

import sys

import rank_processes
from markov_draws import inputs

from jitspark.runtime.markov_reference import ReferenceLoop

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
    return rank_processes.run_ranks(__file__, folder, size)


if __name__ == "__main__":
    rank_processes.answer_as_ranks(sample, int(sys.argv[1]), sys.argv[2])
