"""`additional_config["jitspark"]`: what it may hold, how mistakes are named, and that it beats the environment."""

import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from support_check_cases import plain_deployment, plain_modules, put

from jitspark.errors import GeometryError, UsageError
from jitspark.runtime import flashinfer_ops, specialized_decode_config, unsupported
from jitspark.runtime.options import _SETTINGS, Options, from_vllm_config, parse, settings_for
from jitspark.runtime.parts import FLASHINFER_PARTS, FLASHINFER_REFUSED, PARTS
from jitspark.runtime.providers import PROVIDERS, chosen
from jitspark.settings import Settings, from_environment

SECTION = 'additional_config["jitspark"]'


@pytest.fixture
def deployment(monkeypatch):
    made = plain_deployment()
    for name, module in plain_modules(made).items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


@pytest.fixture
def install_flashinfer(monkeypatch, tmp_path):
    """Puts an importable package with FlashInfer's names and any version on the path."""

    def install(version=flashinfer_ops.VERSION, package="flashinfer"):
        metadata = tmp_path / f"flashinfer_python-{version}.dist-info" / "METADATA"
        for path, text in (
            (metadata, f"Name: flashinfer-python\nVersion: {version}\n"),
            (tmp_path / package / "__init__.py", "raise AssertionError('the check must not import it')"),
        ):
            path.parent.mkdir()
            path.write_text(text, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def ask(deployment, **options):
    deployment.config.additional_config["jitspark"] = options


def config(**options):
    return SimpleNamespace(additional_config={"jitspark": options})


@pytest.mark.parametrize("extra", [None, {}, {"jitspark": {}}, "text", SimpleNamespace(jitspark={"no": 1})])
def test_without_a_section_all_is_default(extra):
    assert from_vllm_config(SimpleNamespace(additional_config=extra)) == Options()


def test_every_option_is_read():
    made = parse(
        {
            "targets": ["sm_90a"],
            "geometry": "tiny",
            "providers": {"router": "stock", "attention": "flashinfer"},
            "on_error": "stock",
            "exchanges": "torch_distributed",
            "compile": "never",
            "cache_path": ["/a", "/b"],
        }
    )

    assert made == Options(
        targets=("sm_90a",),
        geometry="tiny",
        providers=(("attention", "flashinfer"), ("router", "stock")),
        on_error="stock",
        exchanges="torch_distributed",
        settings=(("cache_path", (Path("/a"), Path("/b"))), ("compile", "never")),
    )


def test_every_setting_can_be_fixed_by_an_option():
    assert set(_SETTINGS) == {field.name for field in fields(Settings)}


def test_every_unknown_key_is_named():
    with pytest.raises(UsageError) as caught:
        parse({"target": ["sm_90a"], "compile": "never", "Geometry": "tiny"})

    assert caught.value.where == SECTION
    assert caught.value.found == "unknown options 'Geometry', 'target'"
    assert "targets, geometry, providers" in caught.value.needed


@pytest.mark.parametrize(
    ("section", "place"),
    [
        ("tiny", ""),
        (["targets"], ""),
        (None, ""),
        ({"targets": "sm_90a"}, "targets"),
        ({"targets": []}, "targets"),
        ({"targets": ["sm_90a", "sm_80"]}, "targets"),
        ({"targets": [90]}, "targets"),
        ({"geometry": ""}, "geometry"),
        ({"geometry": None}, "geometry"),
        ({"on_error": "ignore"}, "on_error"),
        ({"on_error": ["raise"]}, "on_error"),
        ({"providers": "cute"}, "providers"),
        ({"providers": {"attention": "triton"}}, "providers.attention"),
        ({"providers": {"router": "flashinfer"}}, "providers.router"),
        ({"providers": {"router": ["cute"]}}, "providers.router"),
        ({"providers": {"moe": "cute"}}, "providers"),
        ({"compile": True}, "compile"),
        ({"toolchain": "mine"}, "toolchain"),
        ({"compile_slots": 0}, "compile_slots"),
        ({"compile_slots": True}, "compile_slots"),
        ({"compile_slots": "2"}, "compile_slots"),
        ({"trust_writable_roots": 1}, "trust_writable_roots"),
        ({"cache_dir": 3}, "cache_dir"),
        ({"cache_path": "/a:/b"}, "cache_path"),
        ({"cache_path": ["/a", ""]}, "cache_path"),
        ({"cache_path": ["/a", "/b\0"]}, "cache_path"),
        ({"cache_dir": "/a\0b"}, "cache_dir"),
        ({"lock_dir": None}, "lock_dir"),
    ],
    ids=str,
)
def test_a_bad_value_is_named_with_its_place(section, place):
    with pytest.raises(UsageError) as caught:
        parse(section)

    assert caught.value.where == SECTION + "".join(f'["{step}"]' for step in place.split(".") if step)


def test_bad_options_end_the_start_up_also_where_errors_would_run_stock(deployment):
    ask(deployment, on_error="stock", cachedir="/a")

    with pytest.raises(UsageError, match="unknown option 'cachedir'"):
        specialized_decode_config(deployment.config)


def test_options_beat_the_environment_and_leave_the_rest_to_it():
    environment = {"JITSPARK_COMPILE": "auto", "JITSPARK_TOOLCHAIN": "own", "JITSPARK_CACHE_DIR": "/env"}
    made = settings_for(config(compile="never", cache_dir=None, compile_slots=3), environment)

    assert (made.compile, made.cache_dir, made.compile_slots, made.toolchain) == ("never", None, 3, "own")


def test_without_options_the_environment_decides():
    environment = {"JITSPARK_COMPILE": "never", "JITSPARK_CACHE_DIR": "/env", "JITSPARK_COMPILE_SLOTS": "1"}

    assert settings_for(config(), environment) == from_environment(environment)


@pytest.mark.parametrize(
    ("name", "place"), [("muse_spork", ""), ("no/such.toml", ": no/such.toml")], ids=["name", "path"]
)
def test_a_geometry_that_cannot_be_loaded_names_the_option(deployment, name, place):
    ask(deployment, geometry=name)

    with pytest.raises(GeometryError) as caught:
        unsupported(deployment.config)

    assert caught.value.where == f'{SECTION}["geometry"]{place}'


def test_every_part_is_ours_unless_said_otherwise():
    made = chosen(config(providers={"logits": "stock", "experts": "flashinfer"}))

    assert tuple(provider.part for provider in made) == PARTS
    assert {provider.part: provider.name for provider in made if provider.name != "cute"} == {
        "logits": "stock",
        "experts": "flashinfer",
    }


def test_stock_exchanges_for_one_rank_only(deployment, monkeypatch):
    several = PROVIDERS["all_reduce", "stock"].requirements(deployment.config)
    put(monkeypatch, deployment, {"config.parallel_config.tensor_parallel_size": 1})

    assert several == "the stock provider for all_reduce above TP 1"
    assert PROVIDERS["all_reduce", "stock"].requirements(deployment.config) is None


@pytest.mark.parametrize(
    ("exchanges", "served"), [("auto", False), ("symmetric_memory", False), ("torch_distributed", True)]
)
def test_exchanges_over_torch_distributed_need_no_peer_memory(deployment, monkeypatch, exchanges, served):
    put(monkeypatch, deployment, {"config.parallel_config.disable_custom_all_reduce": True})
    ask(deployment, exchanges=exchanges)

    assert (unsupported(deployment.config) is None) is served


@pytest.mark.parametrize("part", [part for part in PARTS if part != "all_reduce"])
def test_stock_requires_nothing(deployment, monkeypatch, part):
    put(monkeypatch, deployment, {"config.parallel_config.disable_custom_all_reduce": True})
    put(monkeypatch, deployment, {"config.attention_config.backend": "FLEX_ATTENTION"})

    assert PROVIDERS[part, "stock"].requirements(deployment.config) is None


def test_stock_in_a_part_lifts_our_requirement(deployment, monkeypatch):
    put(monkeypatch, deployment, {"config.attention_config.backend": "FLEX_ATTENTION"})
    ask(deployment, providers={"attention": "stock"})

    assert unsupported(deployment.config) is None


@pytest.mark.parametrize("part", FLASHINFER_PARTS)
def test_flashinfer_at_its_version_on_blackwell_is_accepted(deployment, install_flashinfer, part):
    install_flashinfer()
    ask(deployment, providers={part: "flashinfer"})

    assert unsupported(deployment.config) is None


@pytest.mark.parametrize("part", FLASHINFER_PARTS)
def test_flashinfer_of_another_version_is_refused(deployment, install_flashinfer, part):
    install_flashinfer("0.6.0")
    ask(deployment, providers={part: "flashinfer"})

    assert unsupported(deployment.config) == (
        "the flashinfer provider without flashinfer-python 0.7.2.post1 (0.6.0 is installed)"
    )


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_flashinfer_without_its_package_is_refused(install_flashinfer):
    install_flashinfer(package="another")

    assert flashinfer_ops.missing() == "its package is missing"


def test_an_absent_flashinfer_is_refused(deployment, monkeypatch):
    monkeypatch.setattr(flashinfer_ops, "DISTRIBUTION", "flashinfer-python-that-nobody-has")
    ask(deployment, providers={"attention": "flashinfer"})

    assert unsupported(deployment.config) == (
        "the flashinfer provider without flashinfer-python-that-nobody-has 0.7.2.post1 (it is not installed)"
    )


def test_flashinfer_is_refused_on_hopper(deployment, install_flashinfer):
    install_flashinfer()
    deployment.platform.capability = (9, 0)
    ask(deployment, targets=["sm_90a"], providers={"attention": "flashinfer"})

    assert unsupported(deployment.config) == "the flashinfer provider on sm_90a"


def test_flashinfer_attention_requires_its_own_backend(deployment, install_flashinfer, monkeypatch):
    install_flashinfer()
    put(monkeypatch, deployment, {"config.attention_config.backend": "FLASH_ATTN"})
    ask(deployment, providers={"attention": "flashinfer"})

    assert unsupported(deployment.config) == "attention backends but FLASHINFER (FLASH_ATTN)"


REFUSED = {
    "experts": "no experts that read a plan's weights and leave a row for each token and slot",
    "all_reduce": "no gated residual fused with its all-reduce, no finalize of FP32 rows",
}


def test_every_part_that_flashinfer_is_refused_for_has_a_reason():
    assert set(REFUSED) == set(FLASHINFER_REFUSED) == set(flashinfer_ops.LACKING)
    assert not {*FLASHINFER_PARTS} & {*FLASHINFER_REFUSED}


@pytest.mark.parametrize("part", FLASHINFER_REFUSED)
@pytest.mark.parametrize("installed", [True, False])
def test_flashinfer_is_refused_with_what_it_lacks_installed_or_not(deployment, install_flashinfer, part, installed):
    install_flashinfer(flashinfer_ops.VERSION if installed else "0.6.0")
    ask(deployment, providers={part: "flashinfer"})

    assert unsupported(deployment.config) == f"the flashinfer provider for {part} ({REFUSED[part]})"
