"""A pair whose middle layers have NVFP4 experts: written, read by vLLM's classes, decoded, and judged by references."""

import json
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.muse_spark.modeling_muse_spark")

from decode_steps import LENGTH, MAX_BLOCKS, PagedCache, Request  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from vllm_step import Step  # noqa: E402

from kernel_specs.nvfp4_grouped_gemm_swiglu.drawing import dequantize  # noqa: E402

QUANTIZED = [1, 2]
BYTES = torch.uint8


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A BF16 pair of random weights and its quantized twin, on disk; transformers' model of the first."""
    import vllm_backbone as backbone

    from bench.nvfp4_pair import quantize_pair

    folder = tmp_path_factory.mktemp("nvfp4_pair")
    model, _, weights = backbone.checkpoint(backbone.served_by("tiny"))
    for name in ("target", "draft"):
        (folder / "plain" / name).mkdir(parents=True)
        (folder / "plain" / name / "config.json").write_text(
            json.dumps({"text_config": {"num_hidden_layers": 4}}), encoding="utf-8"
        )
    save_file({name: each.contiguous() for name, each in weights.items()}, folder / "plain/target/model.safetensors")
    quantize_pair(folder / "plain", folder / "nvfp4")
    return SimpleNamespace(plain=folder / "plain", nvfp4=folder / "nvfp4", transformers=model)


@pytest.fixture(scope="module")
def hopper(one_rank):  # noqa: ARG001 - vLLM's groups
    """Classes and methods as on Hopper; what would need a GPU there is left out."""
    import vllm_backbone as backbone
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.models.muse_spark.nvidia import muse_moe_runner

    with pytest.MonkeyPatch.context() as patch:
        backbone.no_gpu(patch)
        patch.setattr(modelopt, "select_nvfp4_moe_backend", lambda **_: (NvFp4MoeBackend.MARLIN, None))
        method = muse_moe_runner.MuseSparkModelOptNvFp4FusedMoE
        patch.setattr(method, "process_weights_after_loading", lambda *_: None)
        yield backbone


@pytest.fixture(scope="module")
def built(tiny_nvfp4, hopper, pair):
    """vLLM's model of the quantized checkpoint, and its decode."""
    model = hopper.build(tiny_nvfp4, load_file(pair.nvfp4 / "target" / "model.safetensors"))
    decode = model.bind_decode(tiny_nvfp4, torch.device("cpu"))
    return SimpleNamespace(model=model, decode=decode, served=model.prepared.deployment, pair=pair)


def test_the_codes_mean_the_weights_that_they_were_made_of(pair):
    plain, quantized = (load_file(each / "target" / "model.safetensors") for each in (pair.plain, pair.nvfp4))
    assert plain.keys() < quantized.keys()
    for layer in QUANTIZED:
        prefix = f"model.language_model.layers.{layer}.mlp.experts."
        for name in ("gate_up_proj", "down_proj"):
            codes, scales, scale = (
                quantized[prefix + name + each] for each in ("", "_weight_scale", "_weight_scale_2")
            )
            scale = scale.view(8, -1).repeat_interleave(codes.shape[1] // (scale.numel() // 8), dim=1)
            values = dequantize(codes, scales.view(BYTES)) * scale[:, :, None].double()
            wanted = plain[prefix + name].double()
            assert float((values - wanted).norm() / wanted.norm()) < 0.11  # what four bits leave of normal numbers


def test_vllm_quantizes_the_experts_of_the_middle_layers_and_nothing_else(built):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    layers = built.model.model.layers
    methods = [type(each.feed_forward.experts.routed_experts.quant_method).__name__ for each in layers]
    assert methods == [
        "MuseSparkModelOptNvFp4FusedMoE" if layer in QUANTIZED else "MuseSparkUnquantizedFusedMoE" for layer in range(4)
    ]
    for layer in layers:
        for part in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.feed_forward.pooler):
            assert isinstance(part.quant_method, UnquantizedLinearMethod)


def test_the_plan_s_experts_are_the_checkpoint_s(built):
    from kernel_specs.nvfp4_grouped_gemm_swiglu.layout import repack_gate_up

    file = load_file(built.pair.nvfp4 / "target" / "model.safetensors")
    for layer in QUANTIZED:
        held = built.model.expert_shares.tensors(layer)
        prefix = f"model.language_model.layers.{layer}.mlp.experts.gate_up_proj"
        codes, _ = repack_gate_up(file[prefix], file[prefix + "_weight_scale"].view(BYTES))
        assert torch.equal(held["gate_up.weight"], codes)
        scale = file[prefix + "_input_scale"].max() * file[prefix + "_weight_scale_2"]
        torch.testing.assert_close(held["gate_up.gate_up_scales"], scale)


@pytest.fixture
def served(built, monkeypatch):
    """A step of one request and a padded one, and vLLM's runner as far as the judge sees it."""
    import vllm.model_executor.layers.vocab_parallel_embedding as embedding
    from vllm.models.muse_spark.common.layers import MuseSpark1xRMSNorm

    monkeypatch.setattr(MuseSpark1xRMSNorm, "supports_fused_kernel", lambda *_: False)
    monkeypatch.setattr(embedding.VocabParallelEmbedding, "forward", lambda self, ids: self.weight[ids.long()])
    monkeypatch.setattr(built.decode, "_served", frozenset({16}))
    torch.manual_seed(8)
    requests = [Request(built.pair.transformers, (0,), 20), None]
    caches = [PagedCache(built.served.backbone, layer, requests, torch.arange(2 * MAX_BLOCKS)) for layer in range(4)]
    for layer, cache in zip(built.model.model.layers, caches, strict=True):
        layer.self_attn.attn.kv_cache = cache.tensor
    built.decode.bind_kv_caches()
    expected = requests[0].step()
    step = Step(built.decode, caches, requests)
    built.decode.capturing(step.metadata)
    monkeypatch.setattr("vllm.forward_context._forward_context", step.context)
    embeds = torch.cat([expected.embeds, torch.zeros_like(expected.embeds)])
    state = SimpleNamespace(supports_mm_inputs=True, encoder_runner=SimpleNamespace(inputs_embeds=embeds))
    batch = SimpleNamespace(num_tokens=8, num_reqs=1, seq_lens=torch.tensor([28, 0]), logits_indices=torch.arange(8))

    def sample(hidden, batch, _):
        return built.model.compute_logits(hidden[batch.logits_indices])

    runner = SimpleNamespace(model=built.model, model_state=state, sample=sample)
    return SimpleNamespace(runner=runner, batch=batch, expected=expected, positions=step.positions, embeds=embeds)


def test_a_step_is_judged_by_its_references_and_stays_near_the_unquantized_model(built, served):
    """On a CPU what serves is the references too: the judge must find nothing, and notice what is changed."""
    from bench.vllm_reference import StepJudge, summary

    with StepJudge(served.runner, 2) as judge:
        for damage in (0.0, 1.0, 0.0):
            built.decode.stepping(16)
            hidden, _ = built.model(None, served.positions, None, served.embeds)
            hidden[3, 5] += damage
            served.runner.sample(hidden, served.batch, None)

    wanted = served.expected.hidden
    errors = (hidden[:LENGTH].float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(errors.mean()) < 0.7, "quantized layers, behind peaked attention"
    others = (hidden[:LENGTH].float() - wanted.roll(1, 0)).norm(dim=-1) / wanted.norm(dim=-1)
    assert float(others.mean()) > 1.2, "rows that have nothing to do with each other"
    first, second = (summary([each]) for each in judge.found)
    assert first["steps_by_rows"] == {16: 1} and first["logits_rows"] == first["same_choice"] == LENGTH
    assert first["problems"] == first["unlike_the_graph"] == [] and first["hidden_error"] == 0.0
    assert "(3, 5)" in second["unlike_the_graph"][0] and second["hidden_error"] > 0.0


def test_a_checkpoint_whose_scales_are_none_is_stock_s_where_that_is_chosen(tiny_nvfp4, hopper, pair, monkeypatch):
    from jitspark.errors import WeightsError
    from jitspark.runtime import decode_backend

    weights = load_file(pair.nvfp4 / "target" / "model.safetensors")
    weights["model.language_model.layers.2.mlp.experts.down_proj_weight_scale"].view(BYTES)[7, 0, 0] = 0x7F
    with pytest.raises(WeightsError, match="layer 2, routed experts: found no w2_weight_scale from the checkpoint"):
        hopper.build(tiny_nvfp4, weights)

    asked = tiny_nvfp4.additional_config
    chosen = {**asked, "jitspark": {**asked["jitspark"], "on_error": "stock"}}
    monkeypatch.setattr(tiny_nvfp4, "additional_config", chosen)
    model = hopper.build(tiny_nvfp4, weights)

    assert model.expert_shares.given_up and decode_backend(tiny_nvfp4) == "auto", "which the draft is built from"
    assert model.bind_decode(tiny_nvfp4, torch.device("cpu")) is None and model.specialized is None
