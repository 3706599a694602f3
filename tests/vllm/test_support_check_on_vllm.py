"""The support check on vLLM's own config classes: the table of tests/unit, and what only they can show."""

import random
from types import SimpleNamespace

import pytest
from support_check_cases import BFLOAT16, CASES, FLOAT32, CompilationMode, CUDAGraphMode, put

from jitspark.runtime import DecodeConfig, specialized_decode_config, text_config_differences, unsupported

# Where vLLM computes the value, the settings that it computes it from.
HEAD_DTYPE = "config.model_config.hf_config.head_dtype"
SOURCES = {
    "config.parallel_config.use_ubatching": {"config.parallel_config.enable_dbo": True},
    "config.model_config.head_dtype": {HEAD_DTYPE: "float32"},
    "config.model_config.dtype": {"config.model_config.dtype": FLOAT32, HEAD_DTYPE: "bfloat16"},
    "config.use_v2_model_runner": {"environment.VLLM_USE_V2_MODEL_RUNNER": "0"},
    "envs.VLLM_BATCH_INVARIANT": {"environment.VLLM_BATCH_INVARIANT": "1"},
}
ADJACENT = [(index, index + 1) for index in range(len(CASES) - 1)]
DISTANT = random.Random(0).sample([(a, b) for b in range(len(CASES)) for a in range(b - 1)], 120)


@pytest.fixture
def deployment(muse_spark_open, platform):
    return SimpleNamespace(config=muse_spark_open, platform=platform)


def real(path, value):
    """The value for vLLM's objects: its own enums and torch's dtypes."""
    import torch
    from vllm import config
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if isinstance(value, (CompilationMode, CUDAGraphMode)):
        return getattr(config, type(value).__name__)[value.name]
    if value in (BFLOAT16, FLOAT32):
        return getattr(torch, value.removeprefix("torch."))
    return AttentionBackendEnum[value.name] if path.endswith("attention_config.backend") else value


def change(patch, deployment, *cases):
    # left to itself, vLLM falls back to its first runner for some of the changes that are to be seen by themselves
    patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    for case in cases:
        apply(patch, deployment, case)


def apply(patch, deployment, case):
    changes = [SOURCES.get(path, {path: value}) for path, value in case.changes.items()]
    for path, value in (item for each in changes for item in each.items()):
        if path.startswith("environment."):
            patch.setenv(path.removeprefix("environment."), value)
        else:
            put(patch, deployment, {path: real(path, value)})


def test_muse_spark_open_is_supported(deployment):
    assert unsupported(deployment.config) is None
    assert text_config_differences(deployment.config) == ()


def test_its_settings_are_the_config_s_own(deployment):
    made = specialized_decode_config(deployment.config)

    assert made == DecodeConfig(tp=8, q=8, max_context=131072, capture_sizes=(1, 2, 4, 8, 16, 24))


def test_the_names_of_the_fields_are_vllm_s_own(deployment):
    """A field that vLLM renamed would make a change to it mean nothing."""
    for case in CASES:
        for path in case.changes:
            root, *owners, name = path.split(".")
            if root != "config" or ".hf_config" in path:
                continue
            owner = deployment.config
            for step in owners:
                owner = getattr(owner, step)

            assert hasattr(owner, name), path


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_failing_field_gives_its_reason(deployment, monkeypatch, case):
    change(monkeypatch, deployment, case)

    assert unsupported(deployment.config) == case.reason
    with pytest.raises(ValueError, match="Muse Spark specialized decode does not support"):
        specialized_decode_config(deployment.config)


@pytest.mark.parametrize("pair", ADJACENT + DISTANT, ids=lambda pair: f"{CASES[pair[0]]} {CASES[pair[1]]}")
def test_of_two_failing_fields_the_earlier_wins(deployment, monkeypatch, pair):
    earlier, later = (CASES[index] for index in pair)
    # vLLM runs its second runner whenever watermarking is on
    expected = later.reason if {earlier.reason, later.reason} == {"the V1 model runner", "watermarking"} else None
    change(monkeypatch, deployment, later, earlier)

    assert unsupported(deployment.config) == (expected or earlier.reason)


@pytest.mark.parametrize("tp", [4, 8, 16])
@pytest.mark.parametrize("capability", [(10, 0), (10, 3)])
def test_every_tp_size_on_both_gpus_is_supported(deployment, monkeypatch, tp, capability):
    put(
        monkeypatch,
        deployment,
        {"config.parallel_config.tensor_parallel_size": tp, "platform.capability": capability},
    )

    assert unsupported(deployment.config) is None


@pytest.mark.parametrize("backend", ["FLASH_ATTN", "FLASHINFER", None])
def test_the_backends_that_a_user_may_name(deployment, monkeypatch, backend):
    from vllm.config import AttentionConfig

    put(monkeypatch, deployment, {"config.attention_config": AttentionConfig(backend=backend)})

    assert unsupported(deployment.config) is None


def test_backends_by_kind_of_layer_are_read(deployment, monkeypatch):
    from vllm.config import AttentionConfig

    attention = AttentionConfig(backend="FLASH_ATTN", backend_per_kind={"sliding_window": "TRITON_ATTN"})
    put(monkeypatch, deployment, {"config.attention_config": attention})

    assert unsupported(deployment.config) == "attention backends but FLASH_ATTN/FLASHINFER (TRITON_ATTN)"


def test_a_machine_without_gpu_is_refused_first(deployment, monkeypatch):
    put(monkeypatch, deployment, {"platform.capability": None})

    assert unsupported(deployment.config) == "this GPU (SM100/103)"


def test_without_the_key_nothing_is_checked(deployment, monkeypatch):
    put(monkeypatch, deployment, {"config.additional_config": {}, "config.model_config": None})

    assert specialized_decode_config(deployment.config) is None


def test_the_tiny_backbone_on_hopper_is_supported_where_opted_in(tiny, platform):
    platform.capability = (9, 0)

    assert unsupported(tiny) is None
    assert specialized_decode_config(tiny) == DecodeConfig(1, 8, 1024, (1, 2, 4, 8, 16, 24))


def test_the_tiny_backbone_is_not_served_without_opting_in(tiny, platform, monkeypatch):
    platform.capability = (9, 0)
    put(monkeypatch, SimpleNamespace(config=tiny), {"config.additional_config": {"decode_backend": "auto"}})

    assert unsupported(tiny) == "this GPU (SM100/103)"
    platform.capability = (10, 0)
    assert unsupported(tiny) == "text configs but Muse Spark Open's"


def test_muse_spark_open_is_not_the_tiny_geometry(deployment, monkeypatch):
    extra = {"decode_backend": "latency_specialized", "jitspark": {"geometry": "tiny"}}
    put(monkeypatch, deployment, {"config.additional_config": extra})

    assert unsupported(deployment.config) == "text configs but the geometry tiny's (hidden_size is 8192, not 512)"
