"""FlashInfer's attention as a plan's operations: what is called fits its signatures, and what is absent is said.

FlashInfer itself is not installed here: modules of its names stand in its place, with the arguments that its
0.7.2.post1 declares, and record what they are given.
"""

import sys
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")

from jitspark.backbone_plan import decode_plan  # noqa: E402
from jitspark.errors import UsageError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.runtime import flashinfer_ops  # noqa: E402


@pytest.fixture
def calls(monkeypatch):
    """What FlashInfer's functions are called with."""
    found = []

    def trtllm_batch_decode_with_kv_cache(  # noqa: PLR0917 - FlashInfer's signature
        query, kv_cache, workspace_buffer, block_tables, seq_lens, max_seq_len, bmm1_scale=1.0, bmm2_scale=1.0,
        window_left=-1, out=None, kv_layout="HND", enable_pdl=None, q_len_per_req=1,
    ):  # fmt: skip
        found.append(("decode", locals().copy()))

    def rmsnorm_sigmoid_gate(input, gate, eps=1e-5, *, enable_pdl=True):  # noqa: A002 - FlashInfer's name
        found.append(("gate", locals().copy()))

    for name, functions in {
        "flashinfer": (),
        "flashinfer.decode": (trtllm_batch_decode_with_kv_cache,),
        "flashinfer.norm": (rmsnorm_sigmoid_gate,),
    }.items():
        module = ModuleType(name)
        for function in functions:
            setattr(module, function.__name__, function)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flashinfer_ops, "missing", lambda: None)
    return found


@pytest.mark.parametrize("window", [0, 64])
def test_attention_gets_queries_cache_and_window_and_is_gated_in_place(calls, window):
    operations = flashinfer_ops.flashinfer_operations("cpu")
    qkvg = torch.zeros(16, 1280, dtype=torch.bfloat16)
    cache, table = torch.zeros(9, 2, 16, 128, dtype=torch.bfloat16), torch.zeros(2, 4, dtype=torch.int32)
    lengths, partials = torch.tensor([40, 9], dtype=torch.int32), [torch.zeros(1)] * 3
    out = torch.zeros(16, 512, dtype=torch.bfloat16)

    operations["flashinfer", "paged_gqa_verify_attention"](
        qkvg, cache, table, lengths, *partials, 0.5, sliding_window=window, tile_blocks=4
    )
    operations["flashinfer", "splitkv_combine_rmsnorm_sigmoid_gate"](*partials, qkvg, out, 1e-5, threads=128)

    (_, decode), (_, gate) = calls
    assert decode["query"].shape == (16, 8, 64)
    assert [each.shape for each in decode["kv_cache"]] == [(9, 2, 16, 64)] * 2
    assert (decode["window_left"], decode["q_len_per_req"], decode["max_seq_len"]) == (window - 1, 8, 64)
    assert decode["bmm1_scale"] == 0.5
    assert gate["input"].data_ptr() == decode["out"].data_ptr() == out.data_ptr()
    assert gate["gate"].data_ptr() == qkvg[:, -512:].data_ptr()


def test_every_attention_launch_of_a_plan_has_an_operation(calls):
    plan = decode_plan(deployment("tiny_swa", 1), 8, "sm_100a", providers={"attention": "flashinfer"})
    operations = flashinfer_ops.flashinfer_operations("cpu")

    assert calls == []
    asked = {each.operation for each in plan.launches if each.provider == "flashinfer"}
    assert {("flashinfer", name) for name in asked} == operations.keys()


def test_a_function_that_lost_an_argument_is_named(calls, monkeypatch):
    monkeypatch.setattr(sys.modules["flashinfer.norm"], "rmsnorm_sigmoid_gate", lambda **_: None)

    with pytest.raises(UsageError, match=r"flashinfer.norm.rmsnorm_sigmoid_gate without input, gate, eps"):
        flashinfer_ops.flashinfer_operations("cpu")
    assert calls == []


def test_a_machine_without_it_says_what_is_needed():
    with pytest.raises(UsageError, match=r"flashinfer-python 0\.7\.2\.post1"):
        flashinfer_ops.flashinfer_operations("cpu")
