"""Deployments made of vLLM's own config classes, on a machine without a GPU: nothing is loaded, only described.

Where a class decides by the GPU (graphs, custom all-reduce, compute capability), the values of a Blackwell machine
are put in its place.
"""

import importlib.metadata
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # configs lie in temporary folders
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# What vLLM's classes need beside the text model, in their smallest form.
VISION = {
    "model_type": "muse_spark_vision",
    "hidden_act": "gelu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "layer_types": ["full_attention"] * 2,
    "patch_size": 14,
    "patch_temporal": 2,
    "merge_size": 2,
    "pos_emb_height": 16,
    "pos_emb_width": 16,
    "layer_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
}
AUDIO = {
    "model_type": "muse_spark_audio",
    "hidden_act": "gelu",
    "patch_sizes": [20, 4],
    "depths": [1, 1],
    "hidden_sizes": [64, 64],
    "num_hidden_layers": 2,
    "conv_kernel_size": 7,
    "mlp_ratio": 2,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(autouse=True, scope="session")
def needs_vllm():
    # a distribution, not a module: from tests/ on the path, this folder looks like a package of that name
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vLLM is not installed")


def target(text):
    return {
        "architectures": ["MuseSparkForConditionalGeneration"],
        "model_type": "muse_spark",
        "text_config": {**text, "model_type": "muse_spark_text", "num_shared_experts": 0},
        "vision_config": VISION,
        "audio_config": {**AUDIO, "out_hidden_size": text["hidden_size"]},
        "projector_hidden_size": 256,
        "projector_hidden_act": "gelu",
        "out_hidden_size": 512,
        "dtype": "bfloat16",
    }


def draft(text, layers, taps):
    return {
        "architectures": ["MuseSparkDSparkModel"],
        "model_type": "muse_spark_dspark",
        **{name: text[name] for name in ("vocab_size", "hidden_size", "num_attention_heads", "head_dim")},
        **{name: text[name] for name in ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps")},
        "num_hidden_layers": layers,
        "draft_position_mode": "rope",
        "residual_dtype": "fp32",
        "moe": {"is_enabled": False},
        "ffn_dim_multiplier": 2.0,
        "target_layer_ids": list(taps),
        "target_hidden_size": text["hidden_size"],
        "mask_token_id": text["vocab_size"] - 1,
        "markov_rank": 32,
        "block_size": 7,
        "is_causal": True,
        "dtype": "bfloat16",
    }


def vllm_config(
    folder, text, *, tp, max_model_len, draft_layers, taps, options=None, draft_fields=None, target_fields=None
):
    """The VllmConfig of a model with this text config and its draft. Takes seconds: vLLM inspects model classes."""
    from vllm.config import (
        CacheConfig,
        CompilationConfig,
        CUDAGraphMode,
        DeviceConfig,
        ModelConfig,
        ParallelConfig,
        SpeculativeConfig,
        VllmConfig,
    )

    drafted = {**draft(text, draft_layers, taps), **(draft_fields or {})}
    for name, content in (("target", {**target(text), **(target_fields or {})}), ("draft", drafted)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(content), encoding="utf-8")
    files = {"model": str(folder / "target"), "tokenizer": str(folder / "target"), "skip_tokenizer_init": True}
    model = ModelConfig(**files, dtype="bfloat16", max_model_len=max_model_len)
    parallel = ParallelConfig(
        tensor_parallel_size=tp, enable_expert_parallel=True, distributed_executor_backend="mp" if tp > 1 else None
    )
    speculation = SpeculativeConfig(
        method="dspark",
        model=str(folder / "draft"),
        num_speculative_tokens=7,
        draft_sample_method="probabilistic",
        target_model_config=model,
        target_parallel_config=parallel,
    )
    config = VllmConfig(
        model_config=model,
        parallel_config=parallel,
        speculative_config=speculation,
        cache_config=CacheConfig(block_size=16),
        device_config=DeviceConfig("cpu"),
        compilation_config=CompilationConfig(cudagraph_capture_sizes=[1, 2, 4, 8, 16, 24]),
        additional_config={"decode_backend": "latency_specialized", **({"jitspark": options} if options else {})},
    )
    # on a platform without graphs or custom all-reduce, vLLM has just turned both off
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4, 8, 16, 24]
    config.parallel_config.disable_custom_all_reduce = False
    return config


@pytest.fixture
def platform(monkeypatch):
    """vLLM's platform as on a machine whose GPUs have `.capability`; its own rules of comparing stay."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    gpu = SimpleNamespace(capability=(10, 0))

    def capability(_, device_id=0):
        assert device_id == 0
        return gpu.capability and DeviceCapability(*gpu.capability)

    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(capability))
    # such a machine has Triton; without it, and on a CPU platform, vLLM takes its first model runner
    monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
    return gpu


@pytest.fixture(scope="session")
def muse_spark_open(tmp_path_factory):
    """Muse Spark Open at TP 8, its text config as transformers gives it when nothing is said."""
    from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig

    return vllm_config(
        tmp_path_factory.mktemp("muse_spark_open"),
        MuseSparkTextConfig().to_dict(),
        tp=8,
        max_model_len=131072,
        draft_layers=5,
        taps=(13, 29, 45, 57, 61),
    )


def tiny_text():
    """The text config of a backbone of four layers, as transformers writes it."""
    from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig

    return MuseSparkTextConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=2048,
        max_position_embeddings=8192,
        layer_types=["full_attention"] * 4,
        layer_rope_theta=[500000.0] * 4,
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_hidden_size=256,
        moe_intermediate_size=256,
        post_norm_eps=1e-5,
        output_multiplier=0.5,
        final_logit_softcapping=30.0,
        sliding_window=64,
    ).to_dict()


TINY = {"tp": 1, "max_model_len": 1024, "draft_layers": 2, "taps": (0, 2, 3)}
ON_HOPPER = {"targets": ["sm_90a"], "geometry": "tiny"}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A backbone of four layers on Hopper at TP 1."""
    return vllm_config(tmp_path_factory.mktemp("tiny"), tiny_text(), **TINY, options=ON_HOPPER)


@pytest.fixture(scope="session")
def tiny_draft(tmp_path_factory):
    """The same with a draft that the kernels serve. Tests that change it change it back."""
    import draft_models

    folder = tmp_path_factory.mktemp("tiny_draft")
    return vllm_config(folder, tiny_text(), **TINY, options=ON_HOPPER, draft_fields=draft_models.CONFIG)


@pytest.fixture(scope="session")
def tiny_nvfp4(tmp_path_factory):
    """The same backbone with NVFP4 experts in its middle layers, as bench/nvfp4_pair.py describes them."""
    from bench.nvfp4_pair import quantization_config

    fields = {"quantization_config": quantization_config([0, 3])}
    options = {**ON_HOPPER, "geometry": str(Path(__file__).parents[2] / "bench" / "tiny_nvfp4.toml")}
    folder = tmp_path_factory.mktemp("tiny_nvfp4")
    return vllm_config(folder, tiny_text(), **TINY, options=options, target_fields=fields)


@pytest.fixture(scope="session")
def one_rank(muse_spark_open, tiny, tiny_draft, tiny_nvfp4):  # noqa: ARG001 - no config can be made after this
    """vLLM on a CPU, its groups made of one rank."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.distributed.parallel_state import model_parallel_is_initialized
    from vllm_cpu import take_cpu_platform

    give_back = take_cpu_platform()
    if not model_parallel_is_initialized():
        with set_current_vllm_config(tiny_draft):
            init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
            initialize_model_parallel(1)
    yield
    give_back()
