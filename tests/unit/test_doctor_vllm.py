"""`doctor --vllm` and `--selftest`: what they look at, and what they say of a machine without it."""

import importlib.metadata
import importlib.util
from types import SimpleNamespace

import pytest

from jitspark import vllm_release
from jitspark.cli import selftest
from jitspark.doctor import checks
from jitspark.doctor import vllm as in_vllm
from jitspark.doctor.check import run
from jitspark.gpus import Gpu, Machine
from jitspark.settings import Settings, allowed_vllm_plugins


@pytest.fixture
def settings(tmp_path):
    return Settings(cache_dir=tmp_path / "cache", lock_dir=tmp_path / "locks")


@pytest.fixture
def installed(monkeypatch):
    """The versions of distributions that this environment seems to have."""
    versions = {"vllm": "0.33.0", "torch": "2.14.0", "flashinfer-python": "0.7.2.post1"}

    def version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    ours = SimpleNamespace(name="jitspark", value="jitspark.vllm_plugin:register")
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(in_vllm.importlib.metadata, "entry_points", lambda group: [ours])  # noqa: ARG005
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return versions


def status_of(part, settings):
    found = run(part, in_vllm.CHECKS[part], settings)
    assert found.remedy or found.status == "PASS"
    return found.status, found.text


@pytest.mark.parametrize("part", in_vllm.CHECKS)
def test_all_is_well_where_the_known_vllm_is(settings, installed, part):  # noqa: ARG001
    assert status_of(part, settings)[0] == "PASS"


def test_without_the_flag_nothing_of_it_is_looked_at(settings):
    assert not {check.part for check in checks(settings)} & set(in_vllm.CHECKS)


@pytest.mark.parametrize(
    ("name", "found", "part", "status"),
    [
        ("vllm", "0.34.0", "vLLM", "FAIL"),
        ("vllm", None, "vLLM", "FAIL"),
        ("torch", "2.14.0+cpu", "torch", "NOTE"),
        ("torch", None, "torch", "FAIL"),
        ("flashinfer-python", "0.8", "FlashInfer", "NOTE"),
        ("flashinfer-python", None, "FlashInfer", "NOTE"),
    ],
)
def test_another_version_is_told(settings, installed, name, found, part, status):
    installed.pop(name)
    installed.update({name: found} if found else {})

    assert status_of(part, settings)[0] == status


def test_a_list_of_plugins_without_ours_is_told(settings, installed, monkeypatch):  # noqa: ARG001
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")

    assert status_of("vLLM plugin", settings) == ("FAIL", "VLLM_PLUGINS leaves jitspark out")
    assert allowed_vllm_plugins({"VLLM_PLUGINS": "a, jitspark"}) == ("a", "jitspark")


def test_no_entry_point_is_told(settings, installed, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(in_vllm.importlib.metadata, "entry_points", lambda group: [])  # noqa: ARG005

    assert status_of("vLLM plugin", settings)[0] == "FAIL"


def test_vllm_s_own_decode_is_told(settings, installed, monkeypatch):  # noqa: ARG001
    monkeypatch.setattr(in_vllm, "has_own_decode", lambda: True)

    assert status_of("vLLM's own decode", settings)[0] == "NOTE"


def test_an_own_decode_is_known_by_its_folder(monkeypatch, tmp_path):
    package = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: package)

    assert not vllm_release.has_own_decode()
    (tmp_path / "models/muse_spark/nvidia/specialized_decode").mkdir(parents=True)
    assert vllm_release.has_own_decode()


def test_a_self_test_without_gpu_is_a_note(settings, monkeypatch):
    monkeypatch.setattr(selftest, "find_gpus", lambda: Machine(None, ()))

    assert selftest.selftest(settings).status == "NOTE"


@pytest.mark.parametrize(("problems", "status"), [((), "PASS"), (("out: 3 of 8 differ",), "FAIL")])
def test_a_self_test_says_which_launch_is_wrong(settings, monkeypatch, problems, status):
    launch = SimpleNamespace(name="layers.3.merge", operation="merge")
    judged = SimpleNamespace(launch=launch, problems=problems, comparisons=(SimpleNamespace(margin=0.25),))
    monkeypatch.setattr(selftest, "find_gpus", lambda: Machine("580", (Gpu("H200", (9, 0)),)))
    monkeypatch.setattr(selftest, "judged", lambda *_: [judged])
    found = selftest.selftest(settings)

    assert found.status == status
    assert (
        "0.25 of what is allowed" if status == "PASS" else "layers.3.merge (merge): out: 3 of 8 differ"
    ) in found.text
