"""JITSPARK_COMPILE=never: everything is checked first, one error names all that misses, nothing compiles."""

import time
from dataclasses import replace

import pytest
from stub_cache import (
    artifact_of,
    fill,
    lookup_in,
    other_toolchain,
    record_of,
    settings_for,
    stub_command,
    wanted,
)

from jitspark.building.build import build, build_and_load
from jitspark.cache.loader import Loader
from jitspark.cache.lookup import Lookup
from jitspark.cache.store import Layer, put
from jitspark.errors import EntryError, MissingEntriesError, TargetError

# Measured: 7 to 8 ms of one core for 64 keys. The rest is room for slower machines.
LIMIT_SECONDS = 0.030


@pytest.fixture
def strict(tmp_path):
    return settings_for(tmp_path / "cache", tmp_path, compile="never")


def refusal(items, lookup, settings, **options):
    with pytest.raises(MissingEntriesError) as caught:
        build(items, lookup, settings, command=("/nowhere/no-compiler",), **options)
    return caught.value


def test_one_error_names_everything_that_misses_and_the_line_that_makes_it(entry, strict):
    error = refusal(wanted(5), lookup_in(entry.layer), strict, warm_command="jitspark warm --tp 8 --target sm_90a")

    assert sorted(error.keys) == sorted(str(item.key) for item in wanted(4, start=1))
    assert "4 missing" in error.found
    assert "`jitspark warm --tp 8 --target sm_90a`" in error.remedy


def test_without_a_command_line_the_remedy_names_the_target(entry, strict):
    assert "--target sm_90a" in refusal(wanted(2), lookup_in(entry.layer), strict).remedy


def test_a_damaged_entry_is_missing_too(entry, strict):
    (entry.directory / "kernel.so").chmod(0o644)
    (entry.directory / "kernel.so").write_bytes(b"x")

    assert refusal(wanted(1), lookup_in(entry.layer), strict).keys == (str(entry.key),)


def test_loading_checks_all_keys_before_it_maps_any(entry, strict, monkeypatch):
    monkeypatch.setattr(Loader, "load", lambda *_: pytest.fail("something was mapped"))

    with pytest.raises(MissingEntriesError):
        build_and_load(wanted(2), lookup_in(entry.layer), Loader(strict), strict)


def test_what_is_there_is_loaded(entry, strict):
    kernels = build_and_load(wanted(1), lookup_in(entry.layer), Loader(strict), strict)

    assert [kernel.entry.key for kernel in kernels] == [entry.key]


def test_the_keys_of_a_plan_are_checked_in_milliseconds(tmp_path, templates, strict):
    items = wanted(64)
    layer = fill(tmp_path / "cache", items, templates)[0].layer

    def seconds():
        started = time.process_time()
        assert build(items, lookup_in(layer), strict).hits == 64
        return time.process_time() - started

    assert min(seconds() for _ in range(10)) < LIMIT_SECONDS


def test_a_cache_for_another_target_only_is_named_with_the_one_asked_for(tmp_path, templates, strict):
    layer = fill(tmp_path / "cache", wanted(1, target="sm_100a"), templates)[0].layer

    error = refusal(wanted(1, target="sm_90a"), lookup_in(layer), strict)

    assert "for sm_100a-" in error.found
    assert "not for sm_90a-" in error.found


def test_an_entry_for_another_target_than_the_devices_is_refused_before_it_is_mapped(tmp_path, templates, strict):
    entry = fill(tmp_path / "cache", wanted(1, target="sm_100a"), templates)[0]

    with pytest.raises(TargetError, match=r"sm_100a.*sm_90a"):
        Loader(strict).load([entry], target="sm_90a")
    assert Loader(strict).load([entry], target="sm_100a")


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({"needs": ("no_such_symbol_anywhere",)}, "runtime ABI"),
        ({"runtime": "cu12"}, "one for cu13"),
    ],
)
def test_an_entry_that_needs_another_runtime_is_refused_before_it_is_mapped(entry, strict, changes, needed):
    odd = replace(entry, record=replace(entry.record, **changes))

    with pytest.raises(EntryError, match=needed):
        Loader(strict).load([odd])


def test_an_entry_for_another_host_is_refused_before_it_is_mapped(entry, strict):
    odd = replace(entry, key=replace(entry.key, host="aarch64-plan9"))

    with pytest.raises(EntryError, match="aarch64-plan9"):
        Loader(strict).load([odd])


def test_an_entry_of_another_toolchain_that_does_not_run_here_is_a_miss(tmp_path, templates):
    item = wanted(1)[0]
    content = artifact_of(item, templates)
    record = record_of(item, content, other_toolchain(), needs=("no_such_symbol_anywhere",))
    layer = Layer(tmp_path, writable=True)
    put(layer, item.key, record, content)

    assert lookup_in(layer).find(item.key) is None


def test_nothing_is_compiled_twice_in_one_call(tmp_path, templates):
    settings = settings_for(tmp_path / "cache", tmp_path)
    (tmp_path / "cache").mkdir()
    report = build([*wanted(2), *wanted(2)], Lookup(settings), settings, command=stub_command(templates))

    assert (len(report.compiled), len(report.entries), report.hits) == (2, 2, 0)
