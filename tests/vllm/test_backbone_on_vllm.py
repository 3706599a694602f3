"""The backbone in vLLM's own classes on a CPU: what is taken from them, and steps taken over, beside transformers."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")

from decode_steps import LENGTH, MAX_BLOCKS, PagedCache, Request  # noqa: E402
from muse_spark_on_transformers import contract_weights  # noqa: E402
from vllm_step import Step  # noqa: E402

CPU = "cpu"
# Attention scores of the geometry lie around 40, so that their roundings to BF16 show in single rows. What is wired
# wrongly makes errors beyond WRONG in the mean.
ROW, MEAN, WRONG = 0.6, 0.2, 0.5


@pytest.fixture(scope="module")
def built(tiny, one_rank):  # noqa: ARG001 - vLLM's groups
    """The loaded model of the geometry `tiny`, and transformers' with the same weights."""
    import vllm_backbone as backbone

    with pytest.MonkeyPatch.context() as patch:
        backbone.no_gpu(patch)
        served = backbone.served_by("tiny")
        model, lm_head, weights = backbone.checkpoint(served)
        made = backbone.build(tiny, weights)
        yield SimpleNamespace(model=made, transformers=model, lm_head=lm_head, served=served, config=tiny)


@pytest.fixture(scope="module")
def decode(built):
    made = built.model.bind_decode(built.config, torch.device(CPU))
    yield made
    built.model.specialized = None


def test_the_weights_are_the_checkpoints_own_as_the_contract_wants_them(built):
    from jitspark.runtime import backbone_tensors

    plans = (*built.model.prepared.decode.values(), *built.model.prepared.logits.values())
    found = backbone_tensors.weights(plans, built.model, built.model.expert_shares, 0)
    wanted = contract_weights(built.transformers, built.served.backbone, built.lm_head)

    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        # coefficients in another order of operations; angles of large positions in FP32
        tolerance = 1e-6 if name.endswith(("alpha", "beta")) else 1e-3 if name == "rope.cos_sin" else 0.0
        torch.testing.assert_close(tensor.float(), wanted[name].float(), rtol=0, atol=tolerance, msg=name)


def test_dense_weights_are_vllm_s_own_memory(built):
    from jitspark.runtime import backbone_tensors

    found = backbone_tensors.weights(built.model.prepared.decode.values(), built.model, built.model.expert_shares, 0)
    layer = built.model.model.layers[2]

    assert found["layers.2.qkv_gate"].data_ptr() == layer.self_attn.qkv_proj.weight.data_ptr()
    assert found["layers.2.ffn_beta"].data_ptr() == layer.add_ffn.beta.data_ptr()


def test_the_layers_share_one_rope_table_and_none_is_taken_for_another(built, decode):  # noqa: ARG001 - it shares them
    from jitspark.errors import WeightsError
    from jitspark.runtime import backbone_tensors

    owners = [layer.self_attn.rotary_emb for layer in built.model.model.layers]
    shared = owners[0].cos_sin_cache
    assert {owner.cos_sin_cache.data_ptr() for owner in owners} == {shared.data_ptr()}

    owners[2].cos_sin_cache = shared.clone()
    assert backbone_tensors.share_rope_tables(built.model) == shared.numel() * 4
    assert owners[2].cos_sin_cache.data_ptr() == shared.data_ptr()

    owners[2].cos_sin_cache = shared * 1.5
    with pytest.raises(WeightsError, match=r"layers\.2\.self_attn\.rotary_emb"):
        backbone_tensors.share_rope_tables(built.model)
    owners[2].cos_sin_cache = shared


def test_the_fields_that_are_read_are_vllm_s_own():
    """The classes of metadata that steps are recognised by: FlashInfer's cannot be imported without it."""
    import ast
    import inspect
    from dataclasses import fields
    from pathlib import Path

    from vllm.v1.attention.backends import flash_attn
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata

    read = {"max_query_len", "num_actual_tokens", "causal", "block_table", "seq_lens", "slot_mapping"}
    assert read <= {field.name for field in fields(FlashAttentionMetadata)}

    source = Path(inspect.getfile(flash_attn)).with_name("flashinfer.py").read_text(encoding="utf-8")
    classes = {node.name: node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)}
    declared = {
        name: {item.target.id for item in classes[name].body if isinstance(item, ast.AnnAssign)}
        for name in ("FlashInferMetadata", "FlashInferTrtllmAPIDecode", "FIDecode")
    }
    counts = {"num_decodes", "num_decode_tokens", "num_prefills", "num_actual_tokens"}
    assert counts | {"causal", "slot_mapping", "decode"} <= declared["FlashInferMetadata"]
    assert {"block_tables", "seq_lens", "q_len_per_req"} <= declared["FlashInferTrtllmAPIDecode"]
    assert "block_tables" not in declared["FIDecode"]


@pytest.mark.parametrize("backend", ["FlashAttentionMetadata", "FlashInferMetadata"])
@pytest.mark.parametrize("ids", [False, True])
def test_steps_taken_over_compute_what_transformers_does(built, decode, monkeypatch, backend, ids):
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding
    from vllm.models.muse_spark.common.layers import MuseSpark1xRMSNorm

    monkeypatch.setattr(MuseSpark1xRMSNorm, "supports_fused_kernel", lambda *_: False)
    monkeypatch.setattr(embedding.VocabParallelEmbedding, "forward", lambda self, ids: self.weight[ids.long()])
    torch.manual_seed(5)
    taps = built.served.backbone.tap_layers
    requests = [Request(built.transformers, taps, 20), None, Request(built.transformers, taps, 0)]
    order = torch.arange(3 * MAX_BLOCKS).flip(0)
    caches = [PagedCache(built.served.backbone, layer, requests, order, token_major=True) for layer in range(4)]
    for layer, cache in zip(built.model.model.layers, caches, strict=True):
        layer.self_attn.attn.kv_cache = cache.tensor
    decode.bind_kv_caches()
    monkeypatch.setattr("vllm.forward_context._forward_context", None)

    for _ in range(2):
        expected = [each and each.step() for each in requests]
        step = Step(decode, caches, requests, backend)
        decode.capturing(step.metadata)
        monkeypatch.setattr("vllm.forward_context._forward_context", step.context)
        embeds = torch.cat([_embeds(each) for each in expected])
        tokens = _tokens(built, embeds) if ids else None
        hidden, tapped = built.model(tokens, step.positions, None, None if ids else embeds)
        logits = built.model.compute_logits(hidden[:LENGTH].contiguous())

        for number, each in enumerate(expected):
            rows = slice(LENGTH * number, LENGTH * number + LENGTH)
            if each is not None:
                _close(hidden[rows], each.hidden)
                for tap, layer in zip(tapped, taps, strict=True):
                    assert tap.dtype == torch.float32
                    _close(tap[rows], each.taps[layer])
        raw = expected[0].hidden @ built.lm_head.float().T
        _close(logits, 30 * torch.tanh(raw * 0.5 / 30))


def _embeds(expected):
    return torch.zeros(LENGTH, 512, dtype=torch.bfloat16) if expected is None else expected.embeds


def _tokens(built, embeds):
    """The token of each embedding."""
    table = built.transformers.embed_tokens.weight
    normed = (table * torch.rsqrt(table.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()
    return (embeds.float() @ normed.float().T).argmax(dim=-1).int()


def _errors(found, wanted):
    """Of whole rows, relative to the row."""
    return (found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)


def _close(found, wanted):
    errors = _errors(found, wanted)
    assert float(errors.max()) < ROW and float(errors.mean()) < MEAN, errors


def test_a_table_of_another_request_is_noticed(built, decode):
    torch.manual_seed(6)
    requests = [Request(built.transformers, (0,), 20), Request(built.transformers, (0,), 20)]
    caches = [PagedCache(built.served.backbone, layer, requests, torch.arange(2 * MAX_BLOCKS)) for layer in range(4)]
    for layer, cache in zip(built.model.model.layers, caches, strict=True):
        layer.self_attn.attn.kv_cache = cache.tensor
    decode.bind_kv_caches()
    expected = [each.step() for each in requests]
    step = Step(decode, caches, requests)
    for metadata in step.metadata.values():
        metadata.block_table = metadata.block_table.flip(0)
    decode.capturing(step.metadata)
    embeds = torch.cat([each.embeds for each in expected])
    hidden, _ = decode.run(decode.step(step.context, 16), None, step.positions, embeds)

    assert float(_errors(hidden[:LENGTH], expected[0].hidden).mean()) > WRONG


def test_every_other_forward_is_stock_s(built, decode, monkeypatch):
    from vllm.models.muse_spark import MuseSparkForConditionalGeneration as Stock

    monkeypatch.setattr(Stock, "forward", lambda *_: "stock")
    requests = [Request(built.transformers, (0,), 20)]
    caches = [PagedCache(built.served.backbone, layer, requests, torch.arange(MAX_BLOCKS)) for layer in range(4)]
    requests[0].step()
    step = Step(decode, caches, requests)

    def forward(context, rows=LENGTH):
        monkeypatch.setattr("vllm.forward_context._forward_context", context)
        return built.model(None, torch.zeros(rows, dtype=torch.int64), None, torch.zeros(rows, 512))

    decode.capturing(dict(step.metadata))
    assert forward(step.context) == "stock"  # a step of the server, whose metadata is another
    decode.capturing(step.metadata)
    step.context.cudagraph_runtime_mode.name = "PIECEWISE"
    assert forward(step.context) == "stock"
    step.context.cudagraph_runtime_mode.name = "NONE"
    assert forward(step.context, rows=LENGTH + 1) == "stock"
    assert forward(None) == "stock"
    step.metadata[next(iter(step.metadata))].max_query_len = 16
    assert forward(step.context) == "stock"


@pytest.mark.usefixtures("decode")
def test_more_rows_than_a_launch_serves_get_stock_s_logits(built, monkeypatch):
    from vllm.models.muse_spark import MuseSparkForConditionalGeneration as Stock

    monkeypatch.setattr(Stock, "compute_logits", lambda *_: "stock")

    assert built.model.compute_logits(torch.zeros(65, 512, dtype=torch.bfloat16)) == "stock"
    assert built.model.compute_logits(torch.zeros(64, 512, dtype=torch.bfloat16)).shape == (64, 2048)
    assert built.model.compute_logits(torch.zeros(1, 512, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_backend_that_vllm_has_chosen_and_nobody_reads_is_refused(built, monkeypatch):
    from jitspark.errors import UsageError
    from jitspark.runtime import backbone

    monkeypatch.setattr(backbone, "_layers", lambda model: list(enumerate(model.model.layers))[:1])
    attention = built.model.model.layers[0].self_attn.attn
    monkeypatch.setattr(attention, "attn_backend", SimpleNamespace(get_name=lambda: "TRITON_FLASHINFER"))
    with pytest.raises(
        UsageError, match="found TRITON_FLASHINFER, as vLLM has chosen; needed FLASH_ATTN or FLASHINFER"
    ):
        backbone._check_attention(built.model, SimpleNamespace(type="cuda"))

    attention.attn_backend = SimpleNamespace(get_name=lambda: "FLASHINFER")
    backbone._check_attention(built.model, SimpleNamespace(type="cuda"))


def test_no_capture_at_all_is_an_error_at_start(decode):
    from jitspark.errors import UsageError

    with pytest.raises(UsageError, match="found none that a plan serves"):
        decode.captured()


class TestTheState:
    """The hooks that vLLM's runner calls, in its order, on its default state."""

    @pytest.fixture
    def state(self, built):
        from vllm.config import set_current_vllm_config

        cls = built.model.get_model_state_cls()
        with set_current_vllm_config(built.config):
            made = cls(built.config, built.model, None, torch.device(CPU))
        yield made
        built.model.specialized = None

    @pytest.fixture
    def stock_attention(self, monkeypatch):
        """vLLM's way to attention metadata, which needs a GPU's backends, gives a new dict each time."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        monkeypatch.setattr(DefaultModelState, "prepare_attn", lambda *_, for_capture=False: {"for": for_capture})

    def test_the_decode_is_bound_when_the_state_is_made(self, built, state):
        assert built.model.specialized is state.decode
        assert sorted(state.decode._executors) == [8, 16, 24]

    def test_caches_are_bound_each_time_that_they_are_made(self, built, state):
        def allocate(blocks):
            for layer in built.model.model.layers:
                layer.self_attn.attn.kv_cache = torch.zeros(blocks, 16, 2, 128, dtype=torch.bfloat16).transpose(1, 2)
            state.initialize_kv_cache(SimpleNamespace(), SimpleNamespace())
            return [state.decode._executors[8]._binding.tensors[f"layers.{i}.kv_cache"].shape[0] for i in range(4)]

        assert allocate(8) == [8] * 4
        assert allocate(40) == [40] * 4

    def test_a_cache_of_other_blocks_is_refused(self, built, state):
        from jitspark.errors import BindingError

        built.model.model.layers[0].self_attn.attn.kv_cache = torch.zeros(8, 2, 32, 128, dtype=torch.bfloat16)

        with pytest.raises(BindingError, match="kv_cache"):
            state.initialize_kv_cache(SimpleNamespace(), SimpleNamespace())

    def test_graphs_that_vllm_has_given_up_are_an_error_before_anything_is_captured(self, built, state, monkeypatch):
        from vllm.config import CUDAGraphMode

        from jitspark.errors import UsageError

        for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
            monkeypatch.setattr(built.config.compilation_config, "cudagraph_mode", mode)
            with pytest.raises(UsageError, match=f"cudagraph_mode {mode.name}, as vLLM has settled on"):
                state.initialize_kv_cache(SimpleNamespace(), SimpleNamespace())

    @pytest.fixture
    def stock_instead(self, built, monkeypatch):
        """`on_error: "stock"`, and what becomes of the experts' shares: they stay for the other tests."""
        monkeypatch.setitem(built.config.additional_config["jitspark"], "on_error", "stock")
        shares = built.model.expert_shares
        stand_in = SimpleNamespace(given_up=False, tensors=shares.tensors, finish=lambda: True, dropped=[])
        stand_in.drop = lambda: stand_in.dropped.append(True)
        monkeypatch.setattr(built.model, "expert_shares", stand_in)
        return stand_in

    def test_a_cache_that_does_not_fit_leaves_the_steps_to_stock_where_that_is_chosen(
        self, built, stock_instead, state, caplog
    ):
        built.model.model.layers[0].self_attn.attn.kv_cache = torch.zeros(8, 2, 32, 128, dtype=torch.bfloat16)

        state.initialize_kv_cache(SimpleNamespace(), SimpleNamespace())

        assert state.decode is None and built.model.specialized is None and stock_instead.dropped == [True]
        assert "Muse Spark runs vLLM's own decode (on_error): rank 0: " in caplog.text and "kv_cache" in caplog.text
        state.capture_inner_cudagraphs(None, None, None, None)  # nothing of ours is left to be asked

    def test_graphs_that_no_plan_serves_are_stock_s_where_that_is_chosen(self, built, stock_instead, state):
        state.capture_inner_cudagraphs(None, None, None, None)

        assert state.decode is None and built.model.specialized is None and stock_instead.dropped == [True]

    def test_plans_that_do_not_fit_the_weights_are_not_bound_where_stock_is_chosen(
        self, built, stock_instead, monkeypatch, caplog
    ):
        monkeypatch.setattr(built.model.model, "aux_hidden_state_layers", (1, 2))

        assert built.model.bind_decode(built.config, torch.device(CPU)) is None
        assert stock_instead.dropped == [True]
        assert "Muse Spark runs vLLM's own backbone (on_error): rank 0: the draft's target_layer_ids" in caplog.text

    def test_experts_that_were_given_up_leave_the_draft_to_stock_too(self, built, stock_instead, monkeypatch):
        from jitspark.runtime import decode_backend

        monkeypatch.setitem(built.config.additional_config, "decode_backend", "latency_specialized")
        stock_instead.finish, stock_instead.given_up = (lambda: False), True

        built.model.process_weights_after_loading()

        assert decode_backend(built.config) == "auto"
        assert built.model.bind_decode(built.config, torch.device(CPU)) is None

    @pytest.mark.usefixtures("stock_attention")
    def test_captures_are_known_and_steps_are_counted(self, state, caplog):
        caplog.set_level("INFO", "jitspark")
        full, none = SimpleNamespace(name="FULL"), SimpleNamespace(name="NONE")
        batch = SimpleNamespace(num_tokens_after_padding=16)

        made = state.prepare_attn(batch, none, for_capture=True)
        assert state.decode._capture is made

        state.decode._captured.update({8, 16})
        state.capture_inner_cudagraphs(None, None, None, None)
        assert state.decode._capture is None
        assert "2 full graphs run plans (8, 16 rows), 58 launches each" in caplog.text

        state.prepare_attn(batch, none)
        assert "first step" not in caplog.text
        state.prepare_attn(batch, full)
        assert "the first step ran a plan" in caplog.text

    def test_ranks_are_told_which_rows_have_graphs(self, state, monkeypatch):
        from jitspark.models import decode_state

        told = []
        monkeypatch.setattr(decode_state, "attempt", lambda *given: told.append(given[2:]) or True)
        state.capture_inner_cudagraphs(None, None, None, None)
        state.decode._captured.update({16, 8})
        state.capture_inner_cudagraphs(None, None, None, None)

        assert told == [("capturing graphs", f"graphs of {rows} rows") for rows in ("no", "8, 16")]

    @pytest.mark.usefixtures("stock_attention")
    def test_a_replayed_step_tells_what_the_draft_waited_for_in_vain(self, state):
        from jitspark.errors import RankError
        from jitspark.runtime.silence import WordWatch

        def problem(word):
            return RankError(where="the draft", found=f"nothing from rank {word - 1}", needed="it", remedy="Look.")

        word = torch.zeros(1, dtype=torch.int32)
        watch = WordWatch({"forward": word}, problem)
        full, batch = SimpleNamespace(name="FULL"), SimpleNamespace(num_tokens_after_padding=16)
        watch.note("forward")
        state.prepare_attn(batch, full)
        word.fill_(2)
        watch.note("forward")  # in the graph

        with pytest.raises(RankError, match="nothing from rank 1"):
            state.prepare_attn(batch, full)


def test_the_word_of_logits_that_ran_is_copied(built, decode, monkeypatch):
    noted, plans = [], built.model.prepared.logits
    monkeypatch.setattr(decode, "_watch", SimpleNamespace(note=noted.append))

    decode.logits(torch.zeros(3, 512, dtype=torch.bfloat16))

    assert noted == [plans[min(rows for rows in plans if rows >= 3)]]
