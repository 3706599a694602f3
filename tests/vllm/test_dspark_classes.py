"""The draft's classes on real vLLM: stock unless asked otherwise, and every refusal and warning."""

import logging
from types import SimpleNamespace

import draft_models
import pytest

pytestmark = pytest.mark.usefixtures("one_rank", "said_anew")
SPECIALIZED = {"decode_backend": "latency_specialized", "jitspark": {"targets": ["sm_90a"], "geometry": "tiny"}}
PARTS = ("ReplicatedLinear", "DSparkMarkovHead", "MuseSparkDSparkModel")


@pytest.fixture
def said_anew():
    """Messages that are said once are said again."""
    import vllm.logger

    for said_once in (vllm.logger._print_info_once, vllm.logger._print_warning_once):
        said_once.cache_clear()


@pytest.fixture
def draft_config(tiny_draft):
    return tiny_draft.speculative_config.draft_model_config.hf_config


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("draft") / "model.safetensors"
    draft_models.checkpoint(path)
    return path


@pytest.fixture
def build(tiny_draft, monkeypatch):
    def built(additional_config, path=None, cls=None):
        monkeypatch.setattr(tiny_draft, "additional_config", additional_config)
        return draft_models.build(tiny_draft, path, cls)

    return built


def bound_parts():
    from vllm.models.muse_spark.common import dspark

    return {name: getattr(dspark, name) for name in PARTS}


@pytest.mark.parametrize("additional", [{}, {"decode_backend": "auto"}, None])
def test_without_the_specialized_decode_the_draft_is_vllm_s(build, weights, additional):
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.models.qwen3_dspark import DSparkMarkovHead
    from vllm.models.muse_spark.common.dspark import MuseSparkDSparkForCausalLM as Stock

    ours, theirs = build(additional, weights), build(additional, weights, Stock)

    assert not hasattr(ours, "sample_sequential")
    assert ours.model.specialized_decode is False and ours.model.specialized_draft is None
    assert type(ours.model.fc) is ReplicatedLinear and type(ours.model.markov_head) is DSparkMarkovHead
    assert [type(module).__mro__[-3:] for module in ours.modules()] == [
        type(module).__mro__[-3:] for module in theirs.modules()
    ]
    for (name, got), (wanted, value) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert name == wanted and got.equal(value), name
    ours.process_weights_after_loading()  # a reload is vLLM's business


def test_the_specialized_draft_has_a_sharded_head_and_its_own_loop(build, weights):
    from jitspark.runtime.draft import DraftDecode
    from jitspark.runtime.markov import VocabParallelMarkovHead

    model = build(SPECIALIZED, weights)

    assert model.model.specialized_decode is True
    assert isinstance(model.model.specialized_draft, DraftDecode)
    assert type(model.model.markov_head) is VocabParallelMarkovHead
    assert model.sample_sequential == model._sample_sequential_fused
    assert "sample_sequential" not in vars(type(model))


def test_each_attention_layer_is_registered_once_behind_the_backbone_s(build, tiny_draft):
    model = build(SPECIALIZED)

    names = [f"model.layers.{4 + layer}.self_attn.attn" for layer in range(draft_models.LAYERS)]
    assert model.get_draft_kv_cache_layer_names() == names
    assert sorted(tiny_draft.compilation_config.static_forward_context) == names


def test_vllm_s_own_names_are_as_before(build, draft_config, monkeypatch):
    before = bound_parts()
    build(SPECIALIZED)
    monkeypatch.setattr(
        draft_config,
        "metap",
        SimpleNamespace(use_metap=True, router_has_one_inf_dim=True, base_width=256, metap_mode="other"),
    )
    with pytest.raises(ValueError, match="Unknown Metap mode 'other'"):
        build(SPECIALIZED)

    assert bound_parts() == before


def test_another_config_class_is_refused(build, tiny_draft, monkeypatch):
    monkeypatch.setattr(tiny_draft.speculative_config.draft_model_config, "hf_config", SimpleNamespace())

    from jitspark.models.dspark import MuseSparkDSparkModel

    with pytest.raises(TypeError, match="MuseSparkDSparkModel requires MuseSparkDSparkConfig"):
        build({}, cls=MuseSparkDSparkModel)


@pytest.mark.parametrize(("field", "value"), [("hidden_size", 1024), ("vocab_size", 4096), ("num_hidden_layers", 3)])
def test_a_size_that_is_not_the_geometry_s_is_refused_before_weights_are_loaded(
    build, draft_config, field, value, monkeypatch
):
    from jitspark.errors import UsageError

    monkeypatch.setattr(draft_config, field, value)

    with pytest.raises(UsageError, match=f"the draft's config.json: {field}: found {value}; needed"):
        build(SPECIALIZED)


def test_layers_share_their_position_mode(build, draft_config, monkeypatch):
    monkeypatch.setattr(draft_config, "every_n_layers_nope", 2)

    with pytest.raises(ValueError, match="Muse Spark DSpark layers must share their positional mode"):
        build({})


def test_layers_share_their_kv_geometry(build):
    model = build({})
    model.model.layers[1].self_attn.qk_norm.variance_epsilon = 1e-3

    with pytest.raises(ValueError, match="Muse Spark DSpark layers must share KV geometry"):
        model.model._build_fused_kv_buffers()


def test_the_layers_are_causal_and_keep_their_stream_in_fp32(build):
    import torch

    for layer in build(SPECIALIZED).model.layers:
        assert layer.self_attn.causal is True
        assert layer.residual_dtype == torch.float32


@pytest.mark.parametrize(
    ("missing", "words"), [("lm_head.weight", "requires its own lm_head"), ("d2t", "requires a d2t vocabulary mapping")]
)
def test_a_checkpoint_must_have_its_own_head_and_mapping(build, weights, missing, words):
    model = build(SPECIALIZED)

    with pytest.raises(ValueError, match=f"Muse Spark DSpark {words}"):
        model.load_weights(draft_models.read(weights, leave_out=(missing,)))


def test_a_draft_top_k_is_refused_where_the_loop_is_fused(build, draft_config, monkeypatch):
    monkeypatch.setattr(draft_config, "dspark_draft_topk", 64, raising=False)

    assert build({}).model.specialized_decode is False
    with pytest.raises(ValueError, match="dspark_draft_topk is set"):
        build(SPECIALIZED)


def test_the_transform_and_its_parameters_agree(build):
    import torch

    model = build({})
    multiplier, soft_cap = model.output_logit_transform_params()
    logits = torch.linspace(-300, 300, 1001).bfloat16()

    assert (multiplier, soft_cap) == (0.5, 30.0)
    wanted = soft_cap * torch.tanh(logits.float() * multiplier / soft_cap)
    torch.testing.assert_close(model.apply_output_logit_transform(logits), wanted, rtol=1e-6, atol=1e-6)


def test_a_draft_whose_sampling_is_left_to_stock_has_stocks_head_and_no_hook(build, weights):
    from vllm.model_executor.models.qwen3_dspark import DSparkMarkovHead

    options = {**SPECIALIZED["jitspark"], "providers": {"markov_sampling": "stock"}}

    model = build({**SPECIALIZED, "jitspark": options}, weights)

    assert type(model.model.markov_head) is DSparkMarkovHead
    assert not hasattr(model, "sample_sequential")
    assert model.model.specialized_draft is not None


def test_weights_are_not_loaded_twice_under_the_specialized_decode(build, weights):
    model = build(SPECIALIZED, weights)

    with pytest.raises(RuntimeError, match="does not support reloading the DSpark draft's weights"):
        model.process_weights_after_loading()
    model.model.specialized_draft, model._markov_sampler = None, object()
    with pytest.raises(RuntimeError, match="does not support reloading"):
        model.process_weights_after_loading()


def test_rocm_keeps_stock_with_one_warning(tiny_draft, monkeypatch, caplog):
    from jitspark.models import dspark

    monkeypatch.setattr(type(dspark.current_platform), "is_rocm", lambda _: True)
    monkeypatch.setattr(tiny_draft, "additional_config", SPECIALIZED)
    with caplog.at_level(logging.WARNING):
        assert [dspark._uses_specialized_decode(tiny_draft) for _ in range(2)] == [False, False]

    warned = [message for message in caplog.messages if "ROCm" in message]
    assert len(warned) == 1
    assert warned[0].endswith("not supported on ROCm; the DSpark draft keeps its stock layers and Markov loop.")


def test_a_backbone_that_fell_back_to_stock_takes_its_draft_along(tiny_draft, monkeypatch):
    from jitspark.models import dspark

    options = {**SPECIALIZED["jitspark"], "on_error": "stock"}
    monkeypatch.setattr(tiny_draft, "additional_config", {**SPECIALIZED, "jitspark": options})
    for reason in (None, "this GPU (SM90)"):
        monkeypatch.setattr(dspark, "unsupported", lambda _, reason=reason: reason)
        assert dspark._uses_specialized_decode(tiny_draft) is (reason is None)


def test_plans_that_cannot_be_had_leave_the_layers_to_stock_only_where_that_is_chosen(build, weights, monkeypatch):
    from jitspark.errors import UsageError
    from jitspark.runtime import draft, fallback

    def refuse(*_):
        raise UsageError(where="the draft", found="another", needed="ours", remedy="Look.")

    monkeypatch.setattr(draft, "build_draft_decode", refuse)
    with pytest.raises(UsageError, match="the draft: found another"):
        build(SPECIALIZED, weights)

    said = []
    monkeypatch.setattr(fallback, "say_once", said.append)
    monkeypatch.setattr("jitspark.models.dspark.unsupported", lambda _: None)
    model = build({**SPECIALIZED, "jitspark": {**SPECIALIZED["jitspark"], "on_error": "stock"}}, weights)

    assert model.model.specialized_draft is None
    assert said == [
        "Muse Spark runs vLLM's own draft layers (on_error): rank 0: the draft: found another; needed ours. Look."
    ]
    assert model.sample_sequential == model._sample_sequential_fused


def test_fc_is_sharded_where_it_can_be(caplog):
    from jitspark.models.dspark import _use_column_parallel_fc

    with caplog.at_level(logging.INFO):
        assert _use_column_parallel_fc(enabled=False, hidden_size=512, tp_size=8) is False
        assert not caplog.records, "nobody asked"
        assert _use_column_parallel_fc(enabled=True, hidden_size=512, tp_size=8) is True
        assert not caplog.records
        assert [_use_column_parallel_fc(enabled=True, hidden_size=512, tp_size=tp) for tp in (3, 3, 1)] == [False] * 3

    assert [(each.levelname, each.args) for each in caplog.records] == [("WARNING", (512, 3)), ("WARNING", (512, 1))]
    assert "divides the draft hidden size 512 (got 3)" in caplog.messages[0]


def test_a_quantized_fc_stays_whole(caplog):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from jitspark.models.dspark import _keep_column_parallel_fc

    class Fp8LinearMethod:
        pass

    with caplog.at_level(logging.INFO):
        kept = [_keep_column_parallel_fc(SimpleNamespace(quant_method=UnquantizedLinearMethod())) for _ in range(2)]
        refused = _keep_column_parallel_fc(SimpleNamespace(quant_method=Fp8LinearMethod()))

    assert (kept, refused) == ([True, True], False)
    said, warned = caplog.messages
    assert said == "Using the column-parallel DSpark draft fc."
    assert "supports only an unquantized draft fc (got Fp8LinearMethod); using the replicated" in warned


def test_the_draft_s_logits_are_vllm_s_plain_tensor():
    import torch

    from jitspark.models.dspark import _draft_logits_values

    cache = torch.zeros(2, 7, 16)
    assert _draft_logits_values(SimpleNamespace(draft_logits=cache)) is cache
    assert _draft_logits_values(SimpleNamespace(draft_logits=None)) is None


def speculator(**changed):
    """What the hook reads of vLLM's speculator."""
    import torch

    fields = {
        **dict.fromkeys(("sample_indices", "sample_idx_mapping", "sample_pos", "_anchor_idx", "seeds", "temperature")),
        "input_buffers": SimpleNamespace(input_ids="ids"),
        "draft_tokens": "tokens",
        "draft_logits": torch.zeros(4, 7, draft_models.VOCAB),
        "_draft_topk": None,
        "draft_watermarker": None,
        "use_fp64_gumbel": False,
        "sample_from_anchor": True,
        "max_num_reqs": 4,
        "num_speculative_steps": 7,
        "use_confidence_head": False,
        "use_acceptance_estimator": False,
    }
    return SimpleNamespace(**{**fields, **changed})


@pytest.mark.parametrize("asked", ["use_confidence_head", "use_acceptance_estimator"])
def test_adaptive_verification_is_refused(build, weights, asked):
    model = build(SPECIALIZED, weights)

    with pytest.raises(ValueError, match="it does not run with adaptive verification"):
        model.sample_sequential(speculator(**{asked: True}), 1, None)


def test_the_sampler_is_built_by_the_first_call_and_called_by_each(build, weights, monkeypatch):
    from jitspark.runtime import markov

    model, built, sampled = build(SPECIALIZED, weights), [], []

    def sample(*given, **named):
        sampled.append((given, named))
        return len(sampled) == 1

    sampler = SimpleNamespace(sample=sample)
    monkeypatch.setattr(markov, "build_markov_sampler", lambda *given, **named: built.append((given, named)) or sampler)
    one = speculator(sample_pos="positions", _anchor_idx="anchors")

    assert [model.sample_sequential(one, requests, "hidden") for requests in (4, 2)] == [True, False]
    assert [given for given, _ in built] == [(model,)]
    assert built[0][1] == {
        "draft_logits": one.draft_logits,
        "draft_topk": None,
        "watermarked": False,
        "use_fp64_gumbel": False,
        "sample_from_anchor": True,
        "max_num_reqs": 4,
        "num_steps": 7,
    }
    assert [given for given, _ in sampled] == [(4, "hidden"), (2, "hidden")]
    named = sampled[0][1]
    assert (named["sample_pos"], named["anchor_idx"], named["input_ids"]) == ("positions", "anchors", "ids")
    assert named["draft_logits"] is one.draft_logits and named["draft_tokens"] == "tokens"
