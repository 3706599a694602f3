"""bench.machine_code_diff on a cache compiled here and copies of it that an edit of the sources might have left."""

from dataclasses import replace

import pytest

from bench.machine_code_diff import DEVICE, HOST, main, sections
from jitspark.building.build import build, wanted_for
from jitspark.cache.lookup import Lookup
from jitspark.cache.record import Record
from jitspark.cache.store import Layer, put
from jitspark.geometry import deployment
from jitspark.key import recipe_of
from jitspark.machine_code import device_image
from jitspark.registry import specializations
from jitspark.settings import Settings
from jitspark.toolchain import own_toolchain

pytestmark = pytest.mark.skipif(own_toolchain() is None, reason="needs nvidia-cutlass-dsl and ld")

KERNEL, TARGET = "logits_softcap", "sm_90a"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The cache, its only specialization and entry."""
    folder = tmp_path_factory.mktemp("cache")
    settings = Settings(cache_dir=folder / "root", lock_dir=folder / "locks", compile_slots=1)
    chosen = specializations(deployment("muse_spark_open", 8), [KERNEL])[:1]
    report = build(wanted_for(chosen, [TARGET]), Lookup(settings), settings)
    assert not report.failed
    return settings.cache_dir, chosen[0], next(iter(report.entries.values()))


def edited(compiled, root, change):
    """A cache of the same specialization from other sources, whose artifact is `change` of the compiled one."""
    _, specialization, entry = compiled
    recipe = replace(recipe_of(specialization, TARGET), sources={"kernel.py": "edited"})
    content = change(entry.read_artifact())
    old = entry.record
    record = Record.of(recipe, own_toolchain(), content, old.signature, old.needs, old.runtime)
    root.mkdir()
    put(Layer(root, writable=True), recipe.key, record, content)
    return root


def flip(content, part, kind):
    """`content` with one byte of a section of `part`, which lies in it, turned over."""
    name = next(name for name in sections(part, kind) if name.endswith("text"))
    body = sections(part, kind)[name][0].partition(b":")[2]
    at = content.index(body) + len(body) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def diff(before, after, capsys, *options):
    status = main([str(before), str(after), *options])
    return status, capsys.readouterr().out


def test_entries_of_other_sources_with_the_same_code_are_equal(compiled, tmp_path, capsys):
    status, text = diff(compiled[0], edited(compiled, tmp_path / "after", bytes), capsys)

    assert status == 0
    assert text == "1 specializations in both: 1 are the same files, 0 have a function of another name\n"


def test_what_lies_behind_the_sections_makes_no_difference(compiled, tmp_path, capsys):
    status, text = diff(compiled[0], edited(compiled, tmp_path / "after", lambda it: it + b"\0"), capsys)

    assert status == 0
    assert text == "1 specializations in both: 0 are the same files, 0 have a function of another name\n"


@pytest.mark.parametrize("side", ["device", "host"])
def test_one_byte_of_code_is_a_difference(compiled, tmp_path, capsys, side):
    def change(content):
        return flip(content, device_image(content), DEVICE) if side == "device" else flip(content, content, HOST)

    status, text = diff(compiled[0], edited(compiled, tmp_path / "after", change), capsys)

    assert status == 1
    line = text.splitlines()[0]
    assert line.startswith(f"{KERNEL}(vector=8) for {TARGET}: {side} .")
    assert line.endswith("text")


def test_a_device_function_of_another_name_is_compared_without_its_host_code(compiled, tmp_path, capsys):
    def change(content):
        assert b"kernel_cutlass_device_" in content
        return flip(content.replace(b"kernel_cutlass_device_", b"kernel_cutlass_fellow_"), content, HOST)

    status, text = diff(compiled[0], edited(compiled, tmp_path / "after", change), capsys)

    assert status == 0
    assert text == "1 specializations in both: 0 are the same files, 1 have a function of another name\n"


def test_a_specialization_that_is_gone_is_a_difference_unless_it_was_not_asked_for(compiled, tmp_path, capsys):
    empty = tmp_path / "after"
    empty.mkdir()

    status, text = diff(compiled[0], empty, capsys)

    assert status == 1
    assert f"only in {compiled[0]}" in text
    assert diff(compiled[0], empty, capsys, "--kernel", "rmsnorm")[0] == 0


def test_two_entries_of_a_specialization_are_refused(compiled, tmp_path, capsys):
    both = edited(compiled, tmp_path / "after", bytes)
    entry = compiled[2]
    put(Layer(both, writable=True), entry.key, entry.record, entry.read_artifact())

    with pytest.raises(SystemExit, match="two entries"):
        diff(both, both, capsys)
