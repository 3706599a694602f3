"""The support check on plain config objects: every refusal by its reason, the order of reasons, and what passes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
from support_check_cases import CASES, DRAFT, TEXT, CUDAGraphMode, plain_deployment, plain_modules, put

from jitspark.errors import UsageError
from jitspark.runtime import (
    MUSE_SPARK_CONFIG,
    TP_SIZES,
    DecodeConfig,
    decode_backend,
    served,
    specialized_decode_config,
    support_check,
    text_config_differences,
    unsupported,
)
from jitspark.runtime.decode import provider_requirements

PARALLEL = "config.parallel_config"
OPTIONS = "config.additional_config"
REFUSED = "Muse Spark specialized decode does not support "


@pytest.fixture
def deployment(monkeypatch):
    made = plain_deployment()
    for name, module in plain_modules(made).items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def asking(**options):
    return {OPTIONS: {"decode_backend": "latency_specialized", "jitspark": options}}


def test_a_supported_deployment_has_no_reason(deployment):
    assert unsupported(deployment.config) is None


def test_its_settings_are_the_config_s_own(deployment):
    made = specialized_decode_config(deployment.config)

    assert made == DecodeConfig(tp=8, q=8, max_context=131072, capture_sizes=(1, 2, 4, 8, 16, 24))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_failing_field_gives_its_reason(deployment, monkeypatch, case):
    put(monkeypatch, deployment, case.changes)

    assert unsupported(deployment.config) == case.reason
    with pytest.raises(ValueError) as caught:
        specialized_decode_config(deployment.config)
    assert str(caught.value) == REFUSED + case.reason


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda index: str(CASES[index]))
def test_of_every_two_failing_fields_the_earlier_wins(deployment, index):
    earlier = CASES[index]
    for later in CASES[index + 1 :]:
        with pytest.MonkeyPatch.context() as patch:
            put(patch, deployment, later.changes)
            put(patch, deployment, earlier.changes)  # last, so that it holds where both write the same field

            assert unsupported(deployment.config) == earlier.reason, f"{earlier} with {later}"


def test_all_reasons_are_found_in_order(deployment, monkeypatch):
    put(monkeypatch, deployment, {f"{PARALLEL}.pipeline_parallel_size": 2, "config.cache_config.block_size": 8})
    put(monkeypatch, deployment, {"platform.capability": (9, 0)})

    found = list(support_check.reasons(deployment.config, served(deployment.config)))

    assert found == ["this GPU (SM100/103)", "pipeline parallelism", "KV cache block sizes but 16"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("platform.capability", (10, 3)),
        (f"{PARALLEL}.tensor_parallel_size", 4),
        (f"{PARALLEL}.tensor_parallel_size", 16),
        ("config.compilation_config.cudagraph_mode", CUDAGraphMode.FULL),
        ("config.compilation_config.cudagraph_mode", CUDAGraphMode.FULL_DECODE_ONLY),
        ("config.speculative_config.draft_model_config", None),
        (f"{DRAFT}.draft_vocab_size", 202048),
        (f"{DRAFT}.draft_vocab_size", None),
        (f"{DRAFT}.sample_from_anchor", True),
        (f"{DRAFT}.dspark_draft_topk", None),
        ("config.cache_config.cache_dtype", "bfloat16"),
        ("config.model_config.max_model_len", 1048576),
        ("config.attention_config.backend", SimpleNamespace(name="FLASH_ATTN")),
        ("config.attention_config.backend_per_kind", {"mla_attention": "TRITON_MLA", "sliding_window": "FLASHINFER"}),
        ("config.attention_config", None),
        # 2 ** -2.5, where the geometry holds the double beside it
        (f"{TEXT}.output_multiplier", 0.17677669529663687),
        (f"{TEXT}.layer_rope_theta", [0 if layer % 4 == 1 else 500000 for layer in range(62)]),
    ],
    ids=str,
)
def test_what_does_not_matter_passes(deployment, monkeypatch, path, value):
    put(monkeypatch, deployment, {path: value})

    assert unsupported(deployment.config) is None


@pytest.mark.parametrize("absent", ["watermark_config", "attention_config"])
def test_a_vllm_without_the_field_passes(deployment, monkeypatch, absent):
    monkeypatch.delattr(deployment.config, absent)

    assert unsupported(deployment.config) is None


@pytest.mark.parametrize("extra", [None, {}, {"jitspark": {"no_such": 1}}, "latency_specialized", SimpleNamespace()])
def test_without_the_key_the_backend_is_auto_and_nothing_is_checked(extra):
    config = SimpleNamespace(additional_config=extra)  # any further look at it would fail

    assert (decode_backend(config), specialized_decode_config(config)) == ("auto", None)


def test_auto_may_be_said(monkeypatch, deployment):
    put(monkeypatch, deployment, {OPTIONS: {"decode_backend": "auto"}})

    assert specialized_decode_config(deployment.config) is None


@pytest.mark.parametrize("backend", ["fast", "", None, "Latency_Specialized"])
def test_another_backend_is_an_error(deployment, monkeypatch, backend):
    put(monkeypatch, deployment, {OPTIONS: {"decode_backend": backend}})

    assert decode_backend(deployment.config) == backend
    with pytest.raises(ValueError) as caught:
        specialized_decode_config(deployment.config)
    assert str(caught.value) == "Supported decode_backend values are auto/latency_specialized"


@pytest.mark.parametrize(("sizes", "kept"), [(None, ()), ([], ()), ([1024, 3, 3, 8], (1024, 3, 3, 8))])
def test_the_capture_list_is_kept_as_it_is(deployment, monkeypatch, sizes, kept):
    put(monkeypatch, deployment, {"config.compilation_config.cudagraph_capture_sizes": sizes})

    assert specialized_decode_config(deployment.config).capture_sizes == kept


def test_the_tp_sizes_are_the_geometry_s():
    assert TP_SIZES == (4, 8, 16)


@pytest.mark.parametrize("field", MUSE_SPARK_CONFIG)
@pytest.mark.parametrize("change", ["another", "absent"])
def test_every_field_of_the_text_config_matters_and_is_named(deployment, monkeypatch, field, change):
    text = deployment.config.model_config.hf_text_config
    if change == "absent":
        monkeypatch.delattr(text, field)
    else:
        monkeypatch.setattr(text, field, another(MUSE_SPARK_CONFIG[field]))

    assert unsupported(deployment.config) == "text configs but Muse Spark Open's"
    assert [each.field.partition("[")[0] for each in text_config_differences(deployment.config)] == [field]


def another(value):
    return [*value[:-1], another(value[-1])] if isinstance(value, list) else value * 2 or 1.0


def test_a_differing_layer_is_named_in_the_error_s_notes(deployment, monkeypatch):
    put(monkeypatch, deployment, {f"{TEXT}.layer_types": ["full_attention"] * 62, f"{TEXT}.head_dim": 128})

    with pytest.raises(ValueError) as caught:
        specialized_decode_config(deployment.config)

    assert caught.value.__notes__ == [
        "text config: head_dim is 128, not 64",
        "text config: layer_types[0] is 'full_attention', not 'sliding_attention'",
    ]


def test_another_gpu_is_an_explicit_opt_in(deployment, monkeypatch):
    put(monkeypatch, deployment, {"platform.capability": (9, 0), **asking(targets=["sm_90a"])})

    assert unsupported(deployment.config) is None


@pytest.mark.parametrize("capability", [(10, 0), (8, 9), None])
def test_an_opted_in_gpu_is_the_only_one_that_passes(deployment, monkeypatch, capability):
    put(monkeypatch, deployment, {"platform.capability": capability, **asking(targets=["sm_90a", "sm_103a"])})

    assert unsupported(deployment.config) == "this GPU (SM90/103)"


def test_another_geometry_brings_its_text_config_and_tp_sizes(deployment, monkeypatch):
    put(monkeypatch, deployment, asking(geometry="tiny"))
    wanted = served(deployment.config)
    put(monkeypatch, deployment, {TEXT: SimpleNamespace(**wanted.text_config)})

    assert unsupported(deployment.config) == "TP other than 1/2"
    put(monkeypatch, deployment, {f"{PARALLEL}.tensor_parallel_size": 1})
    assert unsupported(deployment.config) == "context lengths above 8192"
    put(monkeypatch, deployment, {"config.model_config.max_model_len": 8192})
    assert unsupported(deployment.config) is None


def test_another_geometry_than_the_model_s_names_the_field(deployment, monkeypatch):
    put(monkeypatch, deployment, asking(geometry="tiny"))

    assert unsupported(deployment.config) == ("text configs but the geometry tiny's (hidden_size is 8192, not 512)")


@pytest.mark.parametrize("kind", ["full_attention", "sliding_window"])
def test_a_backend_named_for_one_kind_of_layer_counts(deployment, monkeypatch, kind):
    put(monkeypatch, deployment, {"config.attention_config.backend_per_kind": {kind: "TRITON_ATTN"}})

    assert unsupported(deployment.config) == "attention backends but FLASH_ATTN/FLASHINFER (TRITON_ATTN)"


def test_the_draft_s_own_backend_counts(deployment, monkeypatch):
    put(monkeypatch, deployment, {"config.speculative_config.attention_backend": SimpleNamespace(name="TREE_ATTN")})

    assert unsupported(deployment.config) == "attention backends but FLASH_ATTN/FLASHINFER (TREE_ATTN)"


@pytest.mark.parametrize(
    ("backend", "targets", "refused"),
    [("FLASHINFER", [], True), (None, [], True), ("FLASH_ATTN", [], False), (None, ["sm_90a"], False)],
)
def test_flashinfer_needs_its_own_kernels_for_graphs(deployment, monkeypatch, backend, targets, refused):
    """vLLM takes FLASHINFER on Blackwell when no backend is named."""
    asked = asking(targets=targets) if targets else {}
    put(monkeypatch, deployment, {"config.attention_config.backend": backend, **asked})
    assert provider_requirements(deployment.config) is None

    monkeypatch.setattr(deployment.config.attention_config, "use_trtllm_attention", False, raising=False)

    reason = "FLASHINFER without trtllm-gen kernels (use_trtllm_attention false)"
    assert provider_requirements(deployment.config) == (reason if refused else None)


def test_one_rank_needs_no_all_reduce(deployment, monkeypatch):
    put(monkeypatch, deployment, {f"{PARALLEL}.tensor_parallel_size": 1})
    put(monkeypatch, deployment, {f"{PARALLEL}.disable_custom_all_reduce": True})

    assert provider_requirements(deployment.config) is None


def test_with_on_error_stock_an_unsupported_deployment_warns_once_and_runs_stock(deployment, monkeypatch, caplog):
    put(monkeypatch, deployment, {"config.cache_config.block_size": 128, **asking(on_error="stock")})

    assert [specialized_decode_config(deployment.config) for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"{REFUSED}KV cache block sizes but 16; running stock (on_error)"
    ]


def test_a_missing_vllm_is_said(monkeypatch):
    for name in ("torch", "vllm", "vllm.config", "vllm.platforms"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(UsageError, match=r"no usable vLLM in this environment .*vllm 0\.33\.0"):
        unsupported(plain_deployment().config)


def test_importing_the_runtime_imports_neither_vllm_nor_torch():
    code = "import jitspark.runtime, jitspark.runtime.decode, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)

    assert not {"vllm", "torch", "flashinfer", "cutlass", "transformers"} & set(result.stdout.split())
