"""Exchanges between processes over gloo: a world of ranks ends with what one process computes of all payloads."""

import pytest

torch = pytest.importorskip("torch")

from exchange_ranks import EXCHANGES, KERNELS_OWN, ROUNDS, run_ranks, worlds  # noqa: E402


@pytest.mark.parametrize(
    ("task", "size"), [("exchanges", 2), ("exchanges", 4), ("exchanges", 8), ("gathered", 2), ("gathered", 4)]
)
def test_every_exchange_over_gloo_ends_alike_on_all_ranks_and_as_computed_alone(tmp_path, task, size):
    found = run_ranks(task, tmp_path, size)

    for world in worlds(size, KERNELS_OWN if task == "gathered" else EXCHANGES):
        for number in range(ROUNDS):
            want = world.expected(0, number)
            for rank in range(size):
                got = found[rank][world.specialization.title(), number]
                assert got.keys() == want.keys()
                for name, value in want.items():
                    assert torch.equal(got[name].view(torch.uint8), value.view(torch.uint8)), (rank, number, name)


def test_ranks_with_other_plans_are_refused_on_all_of_them(tmp_path):
    found = run_ranks("unequal_plans", tmp_path, 2)

    assert [kind for kind, _ in found] == ["RankError", "RankError"]
    assert all("unlike digests" in text and "on rank 1" in text for _, text in found)


def test_a_peer_that_cannot_be_mapped_ends_all_ranks_with_its_reason(tmp_path):
    found = run_ranks("unmappable", tmp_path, 2)

    assert [kind for kind, _ in found] == ["UsageError", "UsageError"]
    assert all("no way to rank 0" in text for _, text in found)


@pytest.mark.parametrize(("task", "warned"), [("unmappable_auto", 1), ("waiting_auto", 1), ("told", 0)])
def test_ranks_that_cannot_map_a_peer_or_are_told_not_to_exchange_over_torch_distributed(tmp_path, task, warned):
    found = run_ranks(task, tmp_path, 2)

    for rank, each in enumerate(found):
        assert len(each["said"]) == warned
        assert all("torch.distributed" in text and "no way to rank 0" in text for text in each["said"])
        assert each["own"] == [rank]
        assert each["apart"], "what a kernel sends to another rank must not come to its own"
        assert each["gathered"] == [[0, 7], [1, 7]]


def test_ranks_with_other_choices_are_refused_on_all_of_them(tmp_path):
    found = run_ranks("unlike_choices", tmp_path, 2)

    assert [kind for kind, _ in found] == ["RankError", "RankError"]


def test_a_rank_without_memory_is_told_of_before_the_others_gather(tmp_path):
    (kind, text), own = run_ranks("without_memory", tmp_path, 2)

    assert own == ("OutOfMemoryError", "no memory for an inbox")
    assert kind == "RankError"
    assert "rank 1 failed" in text and "no memory for an inbox" in text


def test_a_rank_without_memory_to_map_is_told_of_before_the_others_wait_for_it(tmp_path):
    (kind, text), (own_kind, own) = run_ranks("no_memory_to_map", tmp_path, 2)

    assert (own_kind, kind) == ("DeviceMemoryError", "RankError")
    assert "out of memory" in own
    assert "rank 1 failed" in text and "out of memory" in text
