"""The Markov loop over vocabulary shards, one process each: every rank ends with the unsharded tokens and cache."""

import pytest

torch = pytest.importorskip("torch")

from markov_ranks import SIZES, run_ranks, sample  # noqa: E402

from jitspark.runtime.ranks import RankGroup  # noqa: E402


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_shards_give_the_whole_vocabularys_tokens_and_cache(tmp_path, size):
    tokens, logits = sample(RankGroup(rank=0, size=1))

    found = run_ranks(tmp_path, size)

    assert len(found) == size
    assert len(tokens.unique()) > SIZES["requests"]  # they differ by step
    for rank_tokens, rank_logits in found:
        assert torch.equal(rank_tokens, tokens)
        assert torch.equal(rank_logits.view(torch.int16), logits.view(torch.int16))
