"""vLLM 0.33.0's own routed experts are taken as they were loaded, by its classes, loaders, methods and TP group."""

import importlib

import pytest

pytest.importorskip("torch")

from expert_checkpoint import Experts, write
from expert_ranks import run_ranks

from jitspark.runtime.expert_sources import PROCESSED_FLAG

EXPERTS = {
    "num_local_experts": 8,
    "moe_hidden_size": 256,
    "moe_intermediate_size": 512,
    "weight_dtype": "nvfp4",
    "bf16_layers": [0],
}
LAYERS = [0, 1]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "experts.safetensors"
    write(path, Experts(**EXPERTS), LAYERS)
    return {"path": str(path), "experts": EXPERTS, "layers": LAYERS, "maker": "vllm_experts"}


@pytest.mark.parametrize(("ranks", "sharded"), [(4, "ep"), (2, "tp"), (1, "tp")])
def test_shares_are_the_checkpoints_own(tmp_path, task, ranks, sharded):
    said = run_ranks(tmp_path, {**task, "ranks": ranks, "sharded": sharded, "staging_bytes": 1 << 20})

    assert [rank.get("wrong") for rank in said] == [{}] * ranks


@pytest.mark.parametrize("name", ["w13_weight_scale", "w2_weight_scale_2", "w13_input_scale"])
def test_scales_that_the_checkpoint_lacks_are_refused(tmp_path, task, name):
    said = run_ranks(tmp_path, {**task, "ranks": 2, "lacks": name})

    assert [f"no {name} from the checkpoint" in rank["found"] for rank in said] == [True, True]


def test_vllm_is_asked_whether_weights_come_post_processed():
    module, function = PROCESSED_FLAG

    assert getattr(importlib.import_module(module), function)() is False
