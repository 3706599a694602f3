"""vLLM's own FLASHINFER metadata builder, as on a Blackwell GPU: what it builds for a step is what the takeover reads.

FlashInfer itself is stood in for by names without a body: for what is built here vLLM calls nothing of it.
"""

import ast
import copy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from jitspark.runtime.takeover import layer_tables  # noqa: E402

LENGTH, HEADS, KV_HEADS, HEAD_DIM = 8, 8, 2, 64


@pytest.fixture
def backend(monkeypatch, tiny):
    """vLLM's module with the GPU, the kernels' availability and the layers' parameters of a Blackwell deployment."""
    import vllm
    from vllm.config import set_current_vllm_config

    source = Path(vllm.__file__).parent / "v1" / "attention" / "backends" / "flashinfer.py"
    for name, imported in _imports_of(source, "flashinfer"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for each in imported:
            monkeypatch.setattr(sys.modules[name], each, type(each, (), {}), raising=False)
    from vllm.v1.attention.backends import flashinfer
    from vllm.v1.attention.backends.utils import PerLayerParameters

    monkeypatch.delitem(sys.modules, "vllm.v1.attention.backends.flashinfer")  # made of names: for nobody else
    monkeypatch.setattr(flashinfer, "current_platform", _Blackwell())
    monkeypatch.setattr("vllm.utils.flashinfer.supports_trtllm_attention", lambda **_: True)
    parameters = {"a": PerLayerParameters(-1, None, 0.7), "b": PerLayerParameters(2047, None, 0.7)}  # full and window
    monkeypatch.setattr(flashinfer, "get_per_layer_parameters", lambda *_: parameters)
    monkeypatch.setattr(flashinfer, "get_num_attention_heads_from_layers", lambda *_: HEADS)
    monkeypatch.setattr(flashinfer, "get_dcp_world_size_and_rank", lambda *_: (1, 0))
    monkeypatch.setattr(tiny.cache_config, "get_resolved_kv_cache_layout", lambda: "LBHNC", raising=False)
    with set_current_vllm_config(tiny):
        yield flashinfer


class _Blackwell:
    def is_device_capability_family(self, family):
        return family == 100

    def is_device_capability(self, _):
        return False

    def has_device_capability(self, _):
        return True

    def get_device_capability(self):
        return SimpleNamespace(major=10, minor=0)


def _imports_of(source, package):
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] == package:
            yield package, ()
            yield node.module, [each.name for each in node.names]


@pytest.fixture
def builder(backend, tiny):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16)
    return backend.FlashInferMetadataBuilder(spec, ["a", "b"], tiny, torch.device("cpu"))


def batch(query_lens, *, causal=True):
    """What vLLM's runner tells all builders of a step of these requests."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    requests, rows = len(query_lens), sum(query_lens)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.arange(100, 100 + requests, dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=rows,
        max_query_len=max(query_lens),
        max_seq_len=1024,
        block_table_tensor=torch.arange(requests * 64, dtype=torch.int32).view(requests, 64),
        slot_mapping=torch.arange(rows),
        causal=causal,
    )


@pytest.mark.parametrize("length", [8, 7], ids=["backbone", "draft"])
@pytest.mark.parametrize("requests", [1, 5, 8])
def test_a_captured_step_is_read_where_its_tables_lie(builder, requests, length):
    told = batch([length] * requests)

    metadata = builder.build_for_cudagraph_capture(told)
    found = layer_tables(metadata, requests * length, length)

    assert type(metadata.decode).__name__ == "FlashInferTrtllmAPIDecode"
    for mine, wanted in (
        (found.block_table, told.block_table_tensor),
        (found.seq_lens, told.seq_lens),
        (found.slot_mapping, told.slot_mapping),
    ):
        assert mine.data_ptr() == wanted.data_ptr() and mine.shape == wanted.shape and mine.dtype == wanted.dtype


@pytest.mark.parametrize(
    "told",
    [
        {"query_lens": [8, 24]},  # with a prefill
        {"query_lens": [8, 3, 5]},  # as many rows as two requests have
        {"query_lens": [16]},
    ],
    ids=["prefill", "short drafts", "longer"],
)
def test_other_steps_are_not_recognised(builder, monkeypatch, told):
    monkeypatch.setattr(builder, "_get_prefill_wrapper", lambda **_: SimpleNamespace(plan=lambda **_: None))
    monkeypatch.setattr(builder, "_compute_flashinfer_kv_metadata", lambda *_: None)
    made = batch(**told)

    assert layer_tables(builder.build(0, made), made.num_actual_tokens, LENGTH) is None


def test_without_the_trtllm_kernels_vllm_captures_no_graph_of_such_steps(backend, tiny, monkeypatch):
    """So a deployment without them ends before anything is captured: there would be nothing to take over."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=torch.bfloat16)
    support = backend.FlashInferMetadataBuilder.get_cudagraph_support
    assert support(tiny, spec) == AttentionCGSupport.UNIFORM_BATCH

    monkeypatch.setattr("vllm.utils.flashinfer.supports_trtllm_attention", lambda **_: False)
    assert support(tiny, spec) == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    compilation = copy.copy(tiny.compilation_config)
    mode = compilation.resolve_cudagraph_mode_and_sizes(support(tiny, spec), "FLASHINFER", 8, use_v2_model_runner=True)
    assert mode.decode_mode() != CUDAGraphMode.FULL
