"""Which forwards are decode steps that a plan serves: shapes and context alone decide, for both attention backends."""

from types import SimpleNamespace

import pytest

from jitspark.runtime.takeover import DecodeStep, decode_step

LAYERS = ("a.attn", "b.attn")
LENGTH = 8


class Tensor(list):
    """Something with a length and slices."""

    def __getitem__(self, index):
        return Tensor(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)


def flash_attn(rows, **changes):
    requests = rows // LENGTH
    content = {
        "max_query_len": LENGTH,
        "num_actual_tokens": rows,
        "causal": True,
        "block_table": Tensor([["table"]] * requests),
        "seq_lens": Tensor(range(requests)),
        "slot_mapping": Tensor(range(rows)),
    }
    return type("FlashAttentionMetadata", (SimpleNamespace,), {})(**{**content, **changes})


def flashinfer(rows, decode=None, **changes):
    requests = rows // LENGTH
    inner = {
        "block_tables": Tensor([["table"]] * requests),
        "seq_lens": Tensor(range(requests)),
        "q_len_per_req": LENGTH,
        **(decode or {}),
    }
    content = {
        "num_prefills": 0,
        "num_decodes": requests,
        "num_decode_tokens": rows,
        "num_actual_tokens": rows,
        "causal": True,
        "slot_mapping": Tensor(range(rows)),
        "decode": SimpleNamespace(**{name: value for name, value in inner.items() if value is not None}),
    }
    return type("FlashInferMetadata", (SimpleNamespace,), {})(**{**content, **changes})


def step(metadata, rows=16, mode="NONE", in_capture=lambda _: True, padding=None):
    content = metadata if not hasattr(metadata, "slot_mapping") else dict.fromkeys(LAYERS, metadata)
    context = SimpleNamespace(
        cudagraph_runtime_mode=SimpleNamespace(name=mode), attn_metadata=content, is_padding=padding
    )
    return decode_step(
        context, rows, query_length=LENGTH, served_rows=(8, 16, 64), layers=LAYERS, in_capture=in_capture
    )


@pytest.mark.parametrize("make", [flash_attn, flashinfer])
def test_a_uniform_step_is_taken_over(make):
    found = step(make(16), padding="padding")

    assert isinstance(found, DecodeStep)
    assert (found.rows, found.is_padding, tuple(found.layers)) == (16, "padding", LAYERS)
    assert found.layers["b.attn"].seq_lens == [0, 1]
    assert found.layers["b.attn"].slot_mapping == list(range(16))
    assert found.layers["a.attn"].block_table == [["table"]] * 2


OTHERS = {
    "longer queries": flash_attn(16, max_query_len=16),
    "shorter queries": flash_attn(16, max_query_len=7),
    "padded rows": flash_attn(16, num_actual_tokens=15),
    "not causal": flash_attn(16, causal=False),
    "causal by a tensor": flash_attn(16, causal=object()),
    "one request more": flash_attn(16, block_table=Tensor([["table"]] * 3)),
    "prefills": flashinfer(16, num_prefills=1),
    "prefill tokens": flashinfer(16, num_decode_tokens=8),
    "another query length": flashinfer(16, decode={"q_len_per_req": 4}),
    "a wrapper without tables": flashinfer(16, decode={"block_tables": None}),
    "fewer requests": flashinfer(16, num_decodes=1),
    "no decode tokens": flashinfer(16, num_decode_tokens=0),
    "another backend": type("TritonAttentionMetadata", (SimpleNamespace,), {})(**vars(flash_attn(16))),
}


@pytest.mark.parametrize("metadata", OTHERS.values(), ids=OTHERS)
def test_any_other_metadata_is_stock_s(metadata):
    assert step(metadata) is None


def test_rows_that_no_plan_serves_are_stock_s():
    assert step(flash_attn(24), rows=24) is None
    assert step(flash_attn(16), rows=12) is None


def test_a_piecewise_graph_is_stock_s():
    assert step(flash_attn(16), mode="PIECEWISE") is None
    assert step(flash_attn(16), mode="FULL") is not None


def test_outside_of_a_capture_is_stock_s():
    assert step(flash_attn(16), in_capture=lambda _: False) is None


def test_two_microbatches_and_no_metadata_are_stock_s():
    assert step([dict.fromkeys(LAYERS, flash_attn(16))] * 2) is None
    assert step(None) is None


def test_a_layer_without_metadata_or_unlike_the_others_is_stock_s():
    assert step({"a.attn": flash_attn(16)}) is None
    assert step({"a.attn": flash_attn(16), "b.attn": flash_attn(16, max_query_len=16)}) is None


def test_no_context_at_all_is_stock_s():
    assert decode_step(None, 8, query_length=8, served_rows=(8,), layers=LAYERS, in_capture=lambda _: True) is None
