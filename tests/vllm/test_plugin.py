"""The plugin in real vLLM: found through its entry point, in its registry, and out of the way without the key."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support_check_cases import put

from jitspark import vllm_plugin, vllm_release
from jitspark.errors import MissingEntriesError, TargetError, UsageError

ROOT = Path(__file__).resolve().parents[2]
SPECIALIZED = {"decode_backend": "latency_specialized", "jitspark": {"targets": ["sm_90a"], "geometry": "tiny"}}

INSPECT = """
import json, sys
from dataclasses import asdict
from vllm.plugins import load_general_plugins
from vllm import ModelRegistry
names = json.loads(sys.argv[1])
flags = lambda info: json.dumps(asdict(info))  # from vLLM's cache come lists for tuples
before = {name: ModelRegistry.models[name].inspect_model_cls() for name in names}
load_general_plugins()
import jitspark.vllm_plugin
jitspark.vllm_plugin.register()
after = {name: ModelRegistry.models[name] for name in names}
print(json.dumps({
    "where": {name: entry.module_name for name, entry in after.items()},
    "classes": {name: str(entry.load_model_cls()) for name, entry in after.items()},
    "equal": {name: flags(entry.inspect_model_cls()) == flags(before[name]) for name, entry in after.items()},
    "multimodal": before[names[0]].supports_multimodal,
    "cuda": "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized(),
}))
"""


def python(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_vllm_finds_it_through_its_entry_point():
    found = {each.name: each.value for each in importlib.metadata.entry_points(group="vllm.general_plugins")}

    assert found["jitspark"] == "jitspark.vllm_plugin:register"


def test_the_registry_has_our_classes_with_the_flags_of_vllm_s():
    found = python(INSPECT, json.dumps(list(vllm_plugin.MODELS)))

    assert found["where"] == {name: ours[0] for name, (_, ours) in vllm_plugin.MODELS.items()}
    assert all("jitspark.models" in text for text in found["classes"].values())
    assert found["equal"] == dict.fromkeys(vllm_plugin.MODELS, True)
    assert found["multimodal"] and not found["cuda"]


@pytest.fixture
def registry(monkeypatch):
    """A registry as vLLM has it before any plugin, in the place of the real one."""
    import vllm
    from vllm.model_executor.models.registry import _LazyRegisteredModel, _ModelRegistry

    models = {name: _LazyRegisteredModel(*stock) for name, (stock, _) in vllm_plugin.MODELS.items()}
    made = _ModelRegistry(models)
    monkeypatch.setattr(vllm, "ModelRegistry", made)
    return made


def modules(registry):
    return [registry.models[name].module_name.partition(".")[0] for name in vllm_plugin.MODELS]


def test_registering_twice_is_registering_once(registry):
    vllm_plugin.register()
    first = dict(registry.models)
    vllm_plugin.register()

    assert modules(registry) == ["jitspark", "jitspark"]
    assert registry.models == first


def test_another_model_of_the_name_is_left_alone(registry, caplog):
    registry.register_model(vllm_plugin.BACKBONE, "somebody.else:Model")
    vllm_plugin.register()

    assert modules(registry) == ["somebody", "jitspark"]
    assert "stays out of MuseSparkForConditionalGeneration: it is somebody.else:Model" in caplog.text


def test_another_vllm_keeps_its_draft_and_is_told_once(registry, monkeypatch, caplog):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.34.1")
    vllm_plugin.register()
    vllm_plugin.register()

    assert modules(registry) == ["jitspark", "vllm"]
    assert caplog.text.count("vLLM 0.34.1 is installed, and this jitspark knows 0.33.0") == 1


def test_a_local_build_of_a_known_vllm_is_known(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.33.0+cu130")

    assert vllm_release.unknown_release() is None


class TestTheConfig:
    """Errors that are told where the config is made, before a worker starts."""

    @pytest.fixture
    def complete(self, tiny, monkeypatch):
        """Have vLLM complete a config with this `additional_config`."""
        vllm_plugin.register()

        def run(additional):
            changes = {"config.additional_config": additional, "config.model_config.config_updated": False}
            put(monkeypatch, SimpleNamespace(config=tiny), changes)
            tiny.try_verify_and_update_config()

        return run

    def test_good_ones_pass(self, complete):
        complete({})
        complete({"decode_backend": "auto", "jitspark": {"no": "matter"}})
        complete(SPECIALIZED)

    def test_bad_ones_are_told(self, complete, monkeypatch):
        with pytest.raises(ValueError, match="Supported decode_backend values are auto/latency_specialized"):
            complete({"decode_backend": "fast"})
        with pytest.raises(UsageError, match="unknown option 'targetss'"):
            complete({**SPECIALIZED, "jitspark": {"targetss": []}})
        monkeypatch.setattr(vllm_release, "unknown_release", lambda: "vLLM 0.40 is installed")
        with pytest.raises(UsageError, match=r"vLLM 0\.40 is installed"):
            complete(SPECIALIZED)
        complete({})


class TestTheClass:
    """What is built for a deployment, and every way to be refused, before a weight is loaded."""

    @pytest.fixture(autouse=True)
    def _on_hopper(self, one_rank, monkeypatch):  # noqa: ARG002 - vLLM's groups
        import vllm_backbone

        vllm_backbone.no_gpu(monkeypatch)

    @pytest.fixture
    def construct(self, tiny, monkeypatch):
        """The model of the tiny deployment with this `additional_config`."""
        from vllm.config import set_current_vllm_config

        from jitspark.models.muse_spark import MuseSparkForConditionalGeneration

        def make(additional):
            put(monkeypatch, SimpleNamespace(config=tiny), {"config.additional_config": additional})
            tiny.compilation_config.static_forward_context.clear()
            with set_current_vllm_config(tiny):
                return MuseSparkForConditionalGeneration(vllm_config=tiny)

        return make

    @pytest.mark.parametrize("additional", [{}, {"decode_backend": "auto", "jitspark": {"no": "matter"}}])
    def test_without_the_key_it_is_vllm_s_own_class_and_no_other(self, construct, additional):
        from vllm.models.muse_spark import MuseSparkForConditionalGeneration as Stock

        made = construct(additional)

        assert type(made) is Stock
        assert not hasattr(made, "get_model_state_cls")
        assert not hasattr(made, "process_weights_after_loading")

    def test_with_the_key_it_is_ours(self, construct):
        made = construct(SPECIALIZED)

        assert type(made).__module__ == "jitspark.models.muse_spark"
        assert made.get_model_state_cls().__name__ == "MuseSparkDecodeState"
        assert sorted(made.prepared.decode) == [8, 16, 24]

    def test_another_backend_name_is_refused(self, construct):
        with pytest.raises(ValueError, match="Supported decode_backend values are auto/latency_specialized"):
            construct({"decode_backend": "latency"})

    def test_unknown_options_are_refused(self, construct):
        with pytest.raises(UsageError, match="unknown options 'geometri', 'target'"):
            construct({**SPECIALIZED, "jitspark": {"target": [], "geometri": "tiny"}})

    def test_an_unsupported_deployment_is_refused_with_its_reason(self, construct):
        with pytest.raises(ValueError, match=r"does not support this GPU \(SM100/103\)"):
            construct({"decode_backend": "latency_specialized", "jitspark": {"geometry": "tiny"}})

    def test_or_runs_stock_where_that_is_chosen(self, construct, caplog):
        made = construct({"decode_backend": "latency_specialized", "jitspark": {"on_error": "stock"}})

        assert type(made).__module__.startswith("vllm.")
        assert "running stock (on_error)" in caplog.text

    def test_another_vllm_is_refused(self, construct, monkeypatch):
        monkeypatch.setattr(vllm_release, "unknown_release", lambda: "vLLM 0.40 is installed")

        with pytest.raises(UsageError, match=r"vLLM 0.40 is installed; needed a vLLM whose hooks are known"):
            construct(SPECIALIZED)
        assert type(construct({})).__module__.startswith("vllm.")

    def test_a_vllm_with_its_own_decode_runs_that_unless_told_otherwise(self, construct, monkeypatch, caplog):
        monkeypatch.setattr("jitspark.models.worker.has_own_decode", lambda: True)

        assert type(construct(SPECIALIZED)).__module__.startswith("vllm.")
        assert '["implementation"] = "jitspark"' in caplog.text
        chosen = {**SPECIALIZED["jitspark"], "implementation": "jitspark"}
        assert type(construct({**SPECIALIZED, "jitspark": chosen})).__module__ == "jitspark.models.muse_spark"

    def test_flashinfer_that_is_absent_is_refused(self, construct, monkeypatch):
        monkeypatch.setattr("jitspark.runtime.flashinfer_ops.missing", lambda: "it is not installed")
        options = {"geometry": "tiny", "targets": ["sm_100a"], "providers": {"attention": "flashinfer"}}
        from vllm.platforms import current_platform
        from vllm.platforms.interface import DeviceCapability

        blackwell = classmethod(lambda _, device_id=0: DeviceCapability(10, 0))  # noqa: ARG005
        monkeypatch.setattr(type(current_platform), "get_device_capability", blackwell)

        with pytest.raises(ValueError, match=r"the flashinfer provider without .* \(it is not installed\)"):
            construct({"decode_backend": "latency_specialized", "jitspark": options})

    def test_missing_kernels_are_one_error_that_names_all_of_them(self, construct, monkeypatch, tmp_path):
        from jitspark.runtime import kernel_loading, prepared

        monkeypatch.setattr(prepared, "load_deployment", kernel_loading.load_deployment)
        strict = {"compile": "never", "cache_dir": str(tmp_path), "cache_path": []}

        with pytest.raises(MissingEntriesError, match="jitspark warm --geometry tiny --tp 1 --target sm_90a") as caught:
            construct({**SPECIALIZED, "jitspark": {**SPECIALIZED["jitspark"], **strict}})
        assert len(caught.value.keys) > 50
        assert {key.partition("/")[0] for key in caught.value.keys} >= {"skinny_gemm_bf16", "markov_gumbel_sampling"}

    def test_missing_kernels_run_stock_where_that_is_chosen_and_so_does_the_draft(
        self, construct, monkeypatch, tmp_path, tiny
    ):
        from jitspark.runtime import decode_backend, kernel_loading, prepared

        monkeypatch.setattr(prepared, "load_deployment", kernel_loading.load_deployment)
        chosen = {"compile": "never", "cache_dir": str(tmp_path), "cache_path": [], "on_error": "stock"}
        made = construct({**SPECIALIZED, "jitspark": {**SPECIALIZED["jitspark"], **chosen}})

        assert type(made).__module__.startswith("vllm.")
        assert decode_backend(tiny) == "auto"

    def test_a_rank_on_another_gpu_is_refused(self, construct, monkeypatch):
        monkeypatch.setattr("jitspark.models.worker.specialized_decode_config", lambda _: SimpleNamespace())
        chosen = {**SPECIALIZED, "jitspark": {**SPECIALIZED["jitspark"], "targets": ["sm_100a"]}}

        with pytest.raises(TargetError, match=r"found compute capability 9.0; needed one of sm_100a"):
            construct(chosen)
