"""Routed experts cut anew by processes over gloo: byte for byte what the checkpoint's own share is, in bounded memory,
on all ranks or on none.
"""

import pytest

pytest.importorskip("torch")

from expert_checkpoint import Experts, write
from expert_ranks import run_ranks

MIB = 1 << 20
LAYERS = [0, 1, 2]
REDUCED = {
    "num_local_experts": 16,
    "moe_hidden_size": 256,
    "moe_intermediate_size": 1024,
    "weight_dtype": "nvfp4",
    "bf16_layers": [0],
}
REAL_WIDTHS = {"num_local_experts": 32, "moe_hidden_size": 4096, "moe_intermediate_size": 4096}
ALLOCATOR_NOISE = 12 * MIB


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "experts.safetensors"
    write(path, Experts(**REDUCED), LAYERS)
    return path


def recut(folder, path, **task):
    return run_ranks(folder, {"path": str(path), "experts": REDUCED, "layers": LAYERS, **task})


@pytest.mark.parametrize("staging", [MIB, 512 * MIB], ids=["in rounds", "at once"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_shares_from_expert_shards_are_the_checkpoints_own(tmp_path, checkpoint, ranks, staging):
    said = recut(tmp_path, checkpoint, ranks=ranks, staging_bytes=staging)

    assert [rank["wrong"] for rank in said] == [{}] * ranks
    assert {rank["held"] for rank in said} == {39322000 // ranks + _scalars(ranks)}


def _scalars(ranks):
    """Each rank has all scalars of two layers: 16 experts by 3, and two more."""
    scalars = 2 * (16 * 3 + 2) * 4
    return scalars - scalars // ranks


@pytest.mark.parametrize("ranks", [1, 4])
def test_shares_that_vllm_cut_itself_are_the_checkpoints_own(tmp_path, checkpoint, ranks):
    said = recut(tmp_path, checkpoint, ranks=ranks, sharded="tp")

    assert [rank["wrong"] for rank in said] == [{}] * ranks


def test_at_real_widths_every_byte_is_right_and_memory_is_bounded(tmp_path):
    path = tmp_path / "experts.safetensors"
    write(path, Experts(**REAL_WIDTHS), [0])

    said = recut(tmp_path, path, experts=REAL_WIDTHS, layers=[0], ranks=8, staging_bytes=64 * MIB)

    path.unlink()
    assert [rank["wrong"] for rank in said] == [{}] * 8
    assert max(rank["extra"] for rank in said) <= said[0]["needed"] - said[0]["held"] + ALLOCATOR_NOISE


class TestOneRankFails:
    """Whoever then waited for as long as it may would outlast `run_ranks`."""

    @pytest.mark.parametrize("how", ["raise", "stock"])
    def test_and_the_others_hear_its_reason(self, tmp_path, checkpoint, how):
        said = recut(tmp_path, checkpoint, ranks=4, fault={"rank": 2, "how": how, "at": 2})

        assert said[2]["error"] == "RuntimeError"
        others = [rank for rank in said if rank["rank"] != 2]
        assert [rank["error"] for rank in others] == ["RankError"] * 3
        assert all("rank 2 failed: RuntimeError: the allocator has no more memory" in r["found"] for r in others)

    def test_and_its_death_ends_the_others_wait(self, tmp_path, checkpoint):
        said = recut(tmp_path, checkpoint, ranks=4, fault={"rank": 1, "how": "die", "at": 2})

        assert [rank["rank"] for rank in said] == [0, 2, 3]
        assert all(rank["error"] == "RankError" and "no word from rank 1" in rank["found"] for rank in said)

    def test_and_its_silence_ends_the_others_wait_in_time(self, tmp_path, checkpoint):
        said = recut(tmp_path, checkpoint, ranks=4, fault={"rank": 3, "how": "stall", "at": 1})

        assert [rank["rank"] for rank in said] == [0, 1, 2]
        assert all(rank["error"] == "RankError" and "no word from rank 3" in rank["found"] for rank in said)

    def test_for_lack_of_memory_before_anything_is_exchanged(self, tmp_path, checkpoint):
        said = recut(tmp_path, checkpoint, ranks=2, free_bytes=[1 << 40, 100 * MIB])

        assert [rank["error"] for rank in said] == ["RankError", "DeviceMemoryError"]
        assert said[1]["found"] == "0.1 GiB free"
        assert "0.1 GiB free" in said[0]["found"]

    def test_for_another_round_size_than_the_others_have(self, tmp_path, checkpoint):
        said = recut(
            tmp_path, checkpoint, ranks=3, experts={**REDUCED, "num_local_experts": 15}, staging_bytes=[MIB] * 3
        )
        assert {rank["error"] for rank in said} == {"WeightsError"}  # 1024 outputs on 3 ranks

        said = recut(tmp_path, checkpoint, ranks=2, staging_bytes=[MIB, 2 * MIB])

        assert {rank["error"] for rank in said} == {"RankError"}
        assert all("unlike digests" in rank["found"] for rank in said)

    def test_for_scales_that_the_checkpoint_lacks(self, tmp_path, checkpoint):
        said = recut(tmp_path, checkpoint, ranks=2, lacks="w2_weight_scale")

        assert {rank["error"] for rank in said} <= {"RankError", "WeightsError"}
        assert all("no w2_weight_scale from the checkpoint" in rank["found"] for rank in said)


class TestStockMayRunInstead:
    """`on_error: "stock"`: all ranks give their shares up, or all end."""

    @pytest.mark.parametrize(
        "reason", [{"free_bytes": [1 << 40, 100 * MIB]}, {"lacks": "w2_weight_scale"}], ids=["memory", "scales"]
    )
    def test_and_all_of_them_leave_every_layer_to_it(self, tmp_path, checkpoint, reason):
        said = recut(tmp_path, checkpoint, ranks=2, may_give_up=True, **reason)

        assert [(rank["given_up"], rank["stock"], rank["held"]) for rank in said] == [(True, LAYERS, 0)] * 2, said

    def test_but_not_for_a_failure_that_nobody_has_thought_of(self, tmp_path, checkpoint):
        said = recut(tmp_path, checkpoint, ranks=4, may_give_up=True, fault={"rank": 2, "how": "raise", "at": 2})

        assert [rank["error"] for rank in said] == ["RankError", "RankError", "RuntimeError", "RankError"]
        assert all("the allocator has no more memory" in rank["found"] for rank in said)

    def test_nor_for_a_rank_that_dies(self, tmp_path, checkpoint):
        said = recut(tmp_path, checkpoint, ranks=4, may_give_up=True, fault={"rank": 1, "how": "die", "at": 2})

        assert [(rank["rank"], rank["error"]) for rank in said] == [
            (0, "RankError"),
            (2, "RankError"),
            (3, "RankError"),
        ]
        assert all("no word from rank 1" in rank["found"] for rank in said)
