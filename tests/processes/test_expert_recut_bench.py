"""`python -m bench.expert_recut` on CPUs, with small experts: what it says of right shares, and of a dead rank."""

import json

import pytest

torch = pytest.importorskip("torch")

from rank_processes import ENVIRONMENT  # noqa: E402

from bench import expert_recut  # noqa: E402

SMALL = (
    "--device",
    "cpu",
    "--experts",
    "4",
    "--hidden",
    "512",
    "--width",
    "512",
    "--staging-mib",
    "1",
    "--patience",
    "1200",
)


@pytest.fixture(autouse=True)
def bench_is_found(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def test_every_byte_of_both_layers_is_the_slice_of_the_whole(tmp_path):
    status = expert_recut.main([*SMALL, "--json", str(tmp_path / "found.json")])

    found = json.loads((tmp_path / "found.json").read_text())
    assert status == 0
    layers = [(layer["layer"], layer["wrong"]) for rank in found["ranks"] for layer in rank["layers"]]
    assert layers == [("nvfp4", {}), ("bfloat16", {})] * 2


def test_a_rank_that_dies_within_an_exchange_ends_the_other(tmp_path):
    status = expert_recut.main([*SMALL, "--fault", "die", "--json", str(tmp_path / "found.json")])

    found = json.loads((tmp_path / "found.json").read_text())
    assert status == 0
    assert found["ranks"][0]["error"] == "RankError"


def test_a_byte_that_differs_is_found():
    from bench.recut_layers import NVFP4_LAYER, Experts, differing
    from jitspark.runtime.expert_tp import ExpertShares
    from jitspark.runtime.ranks import RankGroup

    experts, group = Experts(4, 512, 512), RankGroup(0, 1)
    shares = ExpertShares(experts, (NVFP4_LAYER,), group)
    layer = expert_recut.empty_layer(experts, NVFP4_LAYER, group, torch.device("cpu"))
    expert_recut.load(layer, NVFP4_LAYER, experts, group, 3)
    shares.take(NVFP4_LAYER, layer)
    held = dict(shares.tensors(NVFP4_LAYER))

    assert differing(NVFP4_LAYER, experts, group, held, 3) == {}
    held["down.weight_scales"][2, 5] ^= 1
    held["input.global_scale"] += 1
    assert differing(NVFP4_LAYER, experts, group, held, 3) == {"down.weight_scales": [2], "input.global_scale": [-1]}
