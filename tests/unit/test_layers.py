"""Which layer serves, which one is written to, and what happens where there is none."""

import errno
import os
from pathlib import Path

import pytest
from stub_cache import fill, lookup_in, other_toolchain, settings_for, wanted

from jitspark.building.build import build
from jitspark.cache.lookup import Lookup, open_roots
from jitspark.cache.store import Entry, Layer, keys_in
from jitspark.key import toolchain_digest
from jitspark.settings import from_environment
from jitspark.toolchain import own_toolchain

ITEM = wanted(1)[0]


def test_read_only_layers_serve_in_their_order_and_before_the_writable_one(entry, read_only):
    first, second = read_only("first", [ITEM]), read_only("second", [ITEM])

    assert lookup_in(first, second, entry.layer).find(ITEM.key).layer == first
    assert lookup_in(second, first, entry.layer).find(ITEM.key).layer == second
    assert lookup_in(entry.layer).find(ITEM.key).layer == entry.layer


def test_this_process_own_toolchain_serves_before_any_other(entry, read_only):
    image = read_only("image", [ITEM], other_toolchain())

    assert lookup_in(image, entry.layer).find(ITEM.key).layer == entry.layer
    assert lookup_in(image).find(ITEM.key).layer == image


def test_of_other_toolchains_all_processes_choose_the_same(read_only):
    toolchains = [other_toolchain(name) for name in "abcdefgh"]  # so many that the right one is seldom right by chance
    layers = [read_only(t.distributions[0].name, [ITEM], t) for t in toolchains]
    expected = min(toolchain_digest(t) for t in toolchains)

    chosen = {lookup_in(*layers[turn:], *layers[:turn]).find(ITEM.key).toolchain for turn in range(8)}

    assert chosen == {expected}


def test_insisting_on_the_own_toolchain_takes_no_other(read_only, tmp_path):
    image = read_only("image", [ITEM], other_toolchain())

    assert lookup_in(image, settings=settings_for(None, tmp_path, toolchain="own")).find(ITEM.key) is None


def test_a_process_without_a_compiler_takes_what_is_there(entry, monkeypatch):
    monkeypatch.setattr("jitspark.cache.lookup.own_toolchain", lambda: None)

    assert lookup_in(entry.layer).find(ITEM.key).toolchain == toolchain_digest(own_toolchain())


def state_of(root):
    """Everything that writing would change."""
    return {path: (path.lstat().st_mtime_ns, path.lstat().st_mode, path.lstat().st_ino) for path in root.rglob("*")}


def test_a_read_only_root_sees_no_write_at_hits_misses_or_damage(read_only, tmp_path):
    image = read_only("image", wanted(3))
    damaged = next((image.root / "artifacts-v1").rglob("kernel.so"))
    damaged.chmod(0o644)
    damaged.write_bytes(b"damage")
    before = state_of(image.root)
    lookup = Lookup(settings_for(tmp_path / "cache", tmp_path, cache_path=(image.root,)))

    found = [lookup.find(item.key, whole=True) for item in wanted(5)]

    assert [entry is None for entry in found].count(True) == 3
    assert state_of(image.root) == before


def test_a_read_only_root_needs_nothing_but_its_entries(read_only):
    image = read_only("image", [ITEM])
    for name in ("staging", "quarantine", "failures", "ledger"):
        if (image.root / name).exists():
            (image.root / name).rmdir()

    assert lookup_in(image).find(ITEM.key, whole=True) is not None


def test_a_missing_read_only_root_is_said_once_and_the_rest_serves(entry, tmp_path, warnings):
    settings = settings_for(entry.layer.root, tmp_path, cache_path=(tmp_path / "nowhere",))

    assert [Lookup(settings).find(ITEM.key).layer.root for _ in range(3)] == [entry.layer.root] * 3
    assert [str(tmp_path / "nowhere") in text for text in warnings()] == [True]


def test_an_empty_cache_directory_setting_means_memory_only_with_one_warning(warnings):
    settings = from_environment({"JITSPARK_CACHE_DIR": "", "HOME": "/"})

    assert [open_roots(settings).writable for _ in range(3)] == [None] * 3
    assert len(warnings()) == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; see tests/processes/test_filesystems.py")
def test_a_cache_directory_that_cannot_be_written_to_means_memory_only_with_one_warning(tmp_path, warnings):
    (tmp_path / "cache").mkdir(mode=0o555)

    assert open_roots(settings_for(tmp_path / "cache", tmp_path)).writable is None
    assert len(warnings()) == 1


def test_a_cache_directory_that_is_a_file_means_memory_only_with_one_warning(tmp_path, warnings):
    (tmp_path / "cache").write_text("not a folder")

    assert open_roots(settings_for(tmp_path / "cache", tmp_path)).writable is None
    assert len(warnings()) == 1


@pytest.mark.parametrize("home", [None, "", "/nowhere/at/all", "/proc/self"])
def test_without_a_usable_home_the_cache_lies_in_tmp_by_user_id(home):
    environment = {} if home is None else {"HOME": home}

    assert from_environment(environment).cache_dir == Path(f"/tmp/jitspark-{os.geteuid()}")


def test_the_choice_of_tmp_is_said_once(tmp_path, monkeypatch, warnings):
    monkeypatch.setattr("jitspark.cache.lookup.os.geteuid", lambda: f"test-{tmp_path.name}")
    fallback = Path(f"/tmp/jitspark-test-{tmp_path.name}")
    monkeypatch.setattr("jitspark.cache.lookup.root_problem", lambda *_: None)
    try:
        for _ in range(3):
            open_roots(settings_for(fallback, tmp_path))
    finally:
        fallback.rmdir()

    assert [str(fallback) in text for text in warnings()] == [True]


def test_settings_never_ask_who_the_user_is(monkeypatch):
    """A user id without a passwd entry, as containers have."""
    monkeypatch.setattr("pwd.getpwuid", lambda _: (_ for _ in ()).throw(KeyError("no such user")))
    monkeypatch.setattr("os.geteuid", lambda: 54321)

    assert from_environment({}).cache_dir == Path("/tmp/jitspark-54321")


def test_a_relative_cache_directory_stays_where_it_was(tmp_path, monkeypatch, templates):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "cache", [ITEM], templates)
    lookup = Lookup(settings_for(Path("cache"), tmp_path))
    monkeypatch.chdir("/")

    assert lookup.find(ITEM.key, whole=True) is not None


def test_names_that_are_no_keys_are_passed_over(entry):
    top = entry.layer.root / "artifacts-v1"
    for name in ("x", "sm_90a", "a-b", ".. -x", "sm_90a-x86_64-linux/UPPER/" + "0" * 64):
        (top / name / "stub" / "short").mkdir(parents=True)
    (top / "a file").write_text("")

    assert [key for key, _ in keys_in(Layer(entry.layer.root, writable=True))] == [entry.key]


def test_a_root_that_is_named_twice_is_repaired_all_the_same(entry, tmp_path, templates):
    """As a read-only layer a bad entry can only be passed over; as the writable one it is set aside, once."""
    (entry.directory / "kernel.so").chmod(0o644)
    (entry.directory / "kernel.so").write_bytes(b"damage")
    root = entry.layer.root
    lookup = Lookup(settings_for(root, tmp_path, cache_path=(root,)))

    assert lookup.find(entry.key, whole=True) is None
    assert not entry.directory.exists()
    fill(root, [ITEM], templates)
    assert lookup.find(entry.key, whole=True) is not None


def test_a_build_of_hits_writes_nothing_and_takes_no_lock(entry, read_only, tmp_path):
    """In any layer; the last use is noted by who loads, afterwards (`note_uses`)."""
    image = read_only("image", wanted(2, start=1))
    settings = settings_for(entry.layer.root, tmp_path, cache_path=(image.root,))
    before = state_of(tmp_path)

    assert build(wanted(3), Lookup(settings), settings).hits == 3
    assert state_of(tmp_path) == before


def test_memory_serves_before_any_layer(entry, read_only):
    """What could not be published: a layer that has it by now gives the same kernel from other bytes."""
    image = read_only("image", [ITEM])
    lookup = lookup_in(image, entry.layer)
    lookup.remember(Entry(None, ITEM.key, entry.toolchain, entry.record, entry.read_artifact()))

    assert lookup.find(ITEM.key, whole=True).layer is None
    assert lookup_in(image, entry.layer).find(ITEM.key).layer == image


def test_an_entry_that_cannot_be_read_for_the_moment_is_not_touched(entry, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = state_of(entry.layer.root)
    with monkeypatch.context() as broken:
        broken.setattr("jitspark.cache.folders.os.read", failing)
        assert lookup_in(entry.layer).find(ITEM.key) is None

    assert state_of(entry.layer.root) == before
    assert lookup_in(entry.layer).find(ITEM.key, whole=True) is not None
