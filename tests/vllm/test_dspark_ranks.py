"""A specialized draft on two ranks, over gloo on a CPU: fc by columns, the sampling head by vocabulary."""

from pathlib import Path

import draft_models
import pytest
from rank_processes import run_on_vllm

RANK = Path(__file__).parent.parent / "draft_rank.py"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the two ranks says."""
    folder = tmp_path_factory.mktemp("ranks")
    draft_models.checkpoint(folder / "model.safetensors")
    return run_on_vllm(RANK, folder, folder / "model.safetensors")


def test_each_rank_holds_its_columns_of_fc(ranks):
    for each in ranks:
        assert each["fc"] == "ColumnParallelLinear"
        assert each["fc_rows"] == [draft_models.HIDDEN // 2, draft_models.HIDDEN * len(draft_models.TAPS)]
        assert each["own_rows"] is True


def test_combined_states_are_whole_on_every_rank(ranks):
    for each in ranks:
        assert each["shape"] == [24, draft_models.HIDDEN]
        assert each["error"] <= 2**-6 and each["alone"] <= 2**-6, "sums of another order, rounded once"


def test_the_sampling_head_is_a_shard(ranks):
    for each in ranks:
        assert each["markov_rows"] == draft_models.VOCAB // 2


def test_the_plans_make_the_hidden_states_of_stock_layers_on_both_ranks(ranks):
    """Theirs round the sum over the ranks to BF16, ours do not."""
    for each in ranks:
        assert each["draft"] == "DraftDecode"
        assert each["forward"] < 3e-2
    assert ranks[0]["sum"] == ranks[1]["sum"]


def test_plans_that_one_rank_cannot_bind_end_both_with_its_reason(ranks):
    first, second = (each["unbound"] for each in ranks)
    assert second == "OutOfMemoryError: no memory for an arena"
    assert first.startswith("RankError: binding the draft's plans: found rank 1 failed: ")
    assert "no memory for an arena" in first
