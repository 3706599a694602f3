"""A specialized backbone on two CPU ranks, over gloo: shards, experts cut anew, exchanges without mapped memory."""

from pathlib import Path

import pytest
from rank_processes import run_on_vllm

RANK = Path(__file__).parent.parent / "backbone_rank.py"
# as on one rank: attention scores lie around 40, so that their roundings to BF16 show in single rows
ROW, MEAN = 0.6, 0.2


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the two ranks says."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_on_vllm(RANK, folder)


def test_steps_of_two_ranks_compute_what_transformers_does(ranks):
    for each in ranks:
        for name, error in each["errors"].items():
            assert 0 < error["mean"] < MEAN, name
            assert error["max"] < ROW, name


def test_both_ranks_end_with_the_same_bits(ranks):
    assert ranks[0]["digest"] == ranks[1]["digest"]


def test_each_rank_has_its_part_of_every_expert(ranks):
    for each in ranks:
        assert each["experts"] == {"gate_up.weight": [8, 256, 256], "down.weight": [8, 256, 128]}


def test_that_nothing_can_be_mapped_is_said_once(ranks):
    for each in ranks:
        assert len(each["warned"]) == 1
        assert "rank 0 cannot map the others' memory" in each["warned"][0]


def test_a_capture_that_one_rank_does_not_take_for_a_step_ends_both_before_they_exchange(ranks):
    for each in ranks:
        assert "'run by a plan' on rank 0, 'run by vLLM' on rank 1" in each["unlike"]
        assert "a decode step of 16 rows" in each["unlike"]


def test_a_support_check_that_one_rank_alone_does_not_pass_counts_for_both(ranks):
    first, second = (each["refused"] for each in ranks)
    assert second["raised"].startswith("ValueError: ") and "does not support this GPU" in second["raised"]
    assert first["raised"].startswith("RankError: the support check: found rank 1: ValueError: ")
    for each in (first, second):
        assert (each["prepared"], each["then"]) == (None, "auto")


def test_what_fails_on_one_rank_ends_both_or_leaves_both_to_stock(ranks):
    first, second = (each["left"] for each in ranks)
    assert second["raised"].startswith("BindingError: ") and "kv_cache" in second["raised"]
    assert first["raised"].startswith("RankError: binding the KV caches: found rank 1 failed: ")
    assert "kv_cache" in first["raised"]
    for each in (first, second):
        assert (each["mapped"], each["bound"], each["decode"], each["given_up"]) == (None, False, None, True)
