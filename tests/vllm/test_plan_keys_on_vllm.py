"""What a worker asks for, from vLLM's own configs: its graphs' row counts, its plans, and the keys that these name.

vLLM computes the capture lists and the decode graphs itself; whatever they come to, `jitspark warm --tp N` has made it.
"""

import random
from types import SimpleNamespace

import pytest

from jitspark.cli.selection import Selection, wanted_by
from jitspark.plans.planning import Plans, Served
from jitspark.plans.served_rows import served_rows
from jitspark.runtime import specialized_decode_config

TARGET = "sm_100a"
MODES = ("balanced", "interactivity", "throughput")
ODD = [
    [1],
    [7, 9, 15, 17, 31, 33, 63, 65],
    [8],
    [3, 40, 41, 500],
    list(range(1, 65)),
    [72, 80],
    sorted(random.Random(0).sample(range(1, 600), 25)),
]


@pytest.fixture(autouse=True)
def second_runner(monkeypatch):
    """Left to itself, vLLM takes its first runner where another test has put its CPU platform in place."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


def capture_sizes(config, patch, mode, max_num_seqs):
    """vLLM's own list when nothing is said about it."""
    compilation = config.compilation_config
    patch.setattr(compilation, "cudagraph_capture_sizes", None)
    patch.setattr(compilation, "max_cudagraph_capture_size", None)
    patch.setattr(config, "performance_mode", mode)
    patch.setattr(config.scheduler_config, "max_num_seqs", max_num_seqs)
    config._set_cudagraph_sizes()
    return list(compilation.cudagraph_capture_sizes)


def decode_graphs(config):
    """The row counts of the full decode graphs that vLLM would capture."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    manager = CudaGraphManager.__new__(CudaGraphManager)
    own = {
        "vllm_config": config,
        "compilation_config": config.compilation_config,
        "cudagraph_mode": config.compilation_config.cudagraph_mode,
        "max_num_reqs": config.scheduler_config.max_num_seqs,
        "decode_query_len": 8,
        "varlen_decode": False,
        "lora_capture_cases": [0],
        "ubatch_runner": None,
        "_candidates": {},
        "_capture_descs": {},
    }
    for name, value in own.items():
        setattr(manager, name, value)
    manager._init_candidates()
    found = (each for group in manager._capture_descs.values() for each in group)
    return sorted(each.num_tokens for each in found if each.uniform_token_count == 8)


@pytest.fixture(scope="module")
def warmed():
    """By TP size: the keys that `jitspark warm` makes, the plans' requests that it stores, and the keys of each."""

    def of(tp):
        if tp not in found:
            served = Served("muse_spark_open", tp, TARGET, {})
            plans = Plans(served, [])
            requests = {(each.stage.value, each.rows): each for each in served.requests()}
            keys = {item.key for item in wanted_by(Selection((tp,), (TARGET,), "muse_spark_open"))}
            found[tp] = SimpleNamespace(keys=keys, requests=requests, plan=plans.make)
        return found[tp]

    found = {}
    return of


def asked_for(config, tp):
    """(stage, rows) of the plans of a worker of this deployment."""
    decode = specialized_decode_config(config)
    assert decode.tp == tp
    rows = served_rows(decode.capture_sizes, decode.q, config.scheduler_config.max_num_seqs).rows
    requests = range(1, min(8, config.scheduler_config.max_num_seqs) + 1)
    yield from (("decode", each) for each in rows)
    yield from (("logits", each) for each in range(8, 65, 8))
    yield from (("draft", 7 * each) for each in requests)
    yield from (("draft_context", 8 * each) for each in requests)
    yield from (("markov", 7 * each) for each in requests)


@pytest.mark.parametrize("tp", [4, 8, 16])
def test_every_plan_that_warm_stores_names_keys_that_warm_makes(warmed, tp):
    made = warmed(tp)

    for request in made.requests.values():
        lacking = set(made.plan(request).keys()) - made.keys
        assert not lacking, request.title()


@pytest.mark.parametrize("max_num_seqs", [1, 4, 8, 64, 256])
@pytest.mark.parametrize("mode", MODES)
def test_vllm_s_own_capture_lists_ask_for_nothing_but_what_is_warmed(
    muse_spark_open, platform, monkeypatch, warmed, mode, max_num_seqs
):
    assert platform.capability == (10, 0)
    for tp in (4, 8, 16):
        monkeypatch.setattr(muse_spark_open.parallel_config, "tensor_parallel_size", tp)
        sizes = capture_sizes(muse_spark_open, monkeypatch, mode, max_num_seqs)
        asked = list(asked_for(muse_spark_open, tp))

        assert set(asked) <= set(warmed(tp).requests), sizes
        assert any(stage == "decode" for stage, _ in asked), sizes


@pytest.mark.parametrize("sizes", ODD, ids=str)
def test_odd_capture_lists_ask_for_nothing_but_what_is_warmed(muse_spark_open, platform, monkeypatch, warmed, sizes):
    assert platform.capability == (10, 0)
    monkeypatch.setattr(muse_spark_open.compilation_config, "cudagraph_capture_sizes", sizes)
    for tp in (4, 8, 16):
        monkeypatch.setattr(muse_spark_open.parallel_config, "tensor_parallel_size", tp)

        assert set(asked_for(muse_spark_open, tp)) <= set(warmed(tp).requests)


@pytest.mark.parametrize("max_num_seqs", [1, 4, 8, 64])
@pytest.mark.parametrize("sizes", [None, *ODD], ids=str)
def test_the_served_rows_are_the_decode_graphs_that_vllm_captures(
    muse_spark_open, platform, monkeypatch, sizes, max_num_seqs
):
    assert platform.capability == (10, 0)
    if sizes is None:
        sizes = capture_sizes(muse_spark_open, monkeypatch, "balanced", max_num_seqs)
    compilation = muse_spark_open.compilation_config
    monkeypatch.setattr(compilation, "cudagraph_capture_sizes", sizes)
    monkeypatch.setattr(compilation, "max_cudagraph_capture_size", max(sizes))
    monkeypatch.setattr(muse_spark_open.scheduler_config, "max_num_seqs", max_num_seqs)

    ours = served_rows(sizes, 8, max_num_seqs)

    assert list(ours.rows) == [rows for rows in decode_graphs(muse_spark_open) if rows <= 64]
    assert (ours.line() is None) is (not ours.stock)
