"""Each check passes here, and fails when what it looks at is broken."""

import os
from dataclasses import replace

import pytest

from jitspark import doctor, toolchain
from jitspark.cache.lock import Lock
from jitspark.cli.app import app
from jitspark.doctor import caches, machine
from jitspark.gpus import Gpu, Machine
from jitspark.settings import Settings


@pytest.fixture
def settings(tmp_path):
    return Settings(cache_dir=tmp_path / "cache", lock_dir=tmp_path / "locks")


@pytest.fixture
def uncached():
    """Forget the linker and the toolchain that this process found, before and after."""
    for remembered in (toolchain.linker_version, toolchain.own_toolchain):
        remembered.cache_clear()
    yield
    for remembered in (toolchain.linker_version, toolchain.own_toolchain):
        remembered.cache_clear()


def status_of(part, settings):
    (check,) = (check for check in doctor.checks(settings) if check.part == part)
    assert check.remedy or check.status != "FAIL", "a failure says what to do"
    return check.status, check.text


def test_everything_passes_on_a_machine_that_can_build(settings):
    found = {check.part: check.status for check in doctor.checks(settings)}

    assert {part for part, status in found.items() if status == "FAIL"} == set()
    assert found["compiler"] == found["linker"] == found["memory files"] == found["rename"] == "PASS"


@pytest.mark.usefixtures("uncached")
@pytest.mark.parametrize(("compile_mode", "status"), [("auto", "FAIL"), ("never", "NOTE")])
def test_what_only_compiling_needs_fails_only_where_compiling_is_wanted(settings, monkeypatch, compile_mode, status):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(toolchain, "_DISTRIBUTIONS", ("nvidia-cutlass-dsl-of-tomorrow",))
    monkeypatch.setattr(toolchain, "extension_module", lambda: None)
    chosen = replace(settings, compile=compile_mode)

    assert status_of("linker", chosen)[0] == status
    assert status_of("compiler", chosen) == (status, "no nvidia-cutlass-dsl-of-tomorrow")
    assert status_of("CUDA flavour", chosen)[0] == status


def test_an_old_python_fails(settings, monkeypatch):
    monkeypatch.setattr(machine, "MINIMUM_PYTHON", (4, 0))

    assert status_of("Python", settings)[0] == "FAIL"


def test_a_missing_runtime_library_fails_it_and_its_symbols(settings, tmp_path):
    broken = replace(settings, runtime_library=tmp_path / "missing.so")

    assert status_of("runtime library", broken)[0] == "FAIL"
    assert status_of("symbols", broken)[0] == "FAIL"


def test_a_file_that_is_no_library_fails(settings, tmp_path):
    (tmp_path / "text.so").write_text("text")

    assert status_of("runtime library", replace(settings, runtime_library=tmp_path / "text.so"))[0] == "FAIL"


def test_a_missing_symbol_fails_and_is_named(settings, monkeypatch):
    monkeypatch.setattr(machine, "NEEDED_SYMBOLS", ("TVMFFIEnvGetStream", "_cudaFromTomorrow"))

    assert status_of("symbols", settings) == ("FAIL", "no _cudaFromTomorrow")


def test_no_driver_is_a_note(settings, monkeypatch):
    monkeypatch.setattr(machine, "find_gpus", lambda: Machine(None, ()))

    assert status_of("driver", settings)[0] == "NOTE"


def test_a_driver_and_its_gpus_are_told(settings, monkeypatch):
    monkeypatch.setattr(machine, "find_gpus", lambda: Machine("570.1", (Gpu("H", (9, 0)), Gpu("A", (8, 0)))))

    status, text = status_of("driver", settings)
    assert status == "PASS"
    assert "570.1" in text and "H (sm_90a)" in text and "A (no kernel supports it)" in text


@pytest.mark.parametrize("mode", [0o777, 0o775])
def test_a_root_that_others_may_write_to_fails(settings, mode):
    settings.cache_dir.mkdir()
    settings.cache_dir.chmod(mode)

    assert status_of("cache root", settings)[0] == "FAIL"
    assert status_of("cache root", replace(settings, trust_writable_roots=True))[0] == "PASS"
    assert status_of("read-only roots", replace(settings, cache_path=(settings.cache_dir,)))[0] == "FAIL"


def test_a_root_that_cannot_be_made_fails_unless_nothing_need_be_written(settings, tmp_path):
    (tmp_path / "file").touch()
    broken = replace(settings, cache_dir=tmp_path / "file" / "cache")

    assert {status_of(part, broken)[0] for part in ("cache root", "free space", "rename")} == {"FAIL"}
    assert status_of("cache root", replace(broken, compile="never"))[0] == "NOTE"


def test_a_full_disk_fails(settings, monkeypatch):
    monkeypatch.setattr(caches, "NEEDED_BYTES", 2**62)

    assert status_of("free space", settings)[0] == "FAIL"


def test_locks_that_do_not_exclude_fail(settings, monkeypatch):
    monkeypatch.setattr(Lock, "try_acquire", lambda *_: True)

    assert status_of("locks", settings)[0] == "FAIL"


def test_a_rename_over_a_folder_fails(settings, monkeypatch):
    monkeypatch.setattr(os, "rename", lambda *_: None)

    assert status_of("rename", settings)[0] == "FAIL"


def test_a_memory_file_that_is_not_sealed_fails(settings, monkeypatch):
    monkeypatch.setattr(machine, "sealed_memory_file", lambda _, content: unsealed(content))

    assert status_of("memory files", settings)[0] == "FAIL"


def unsealed(content):
    descriptor = os.memfd_create("unsealed")
    os.write(descriptor, content)
    return descriptor


def test_the_command_ends_with_one_when_something_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JITSPARK_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(SystemExit) as bad:
        app(["doctor"])
    monkeypatch.setenv("JITSPARK_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as good:
        app(["doctor", "--json"])

    assert (bad.value.code, good.value.code) == (1, 0)
    assert "FAIL  cache root" in capsys.readouterr().out
