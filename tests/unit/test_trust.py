"""Loading an artifact runs its code: nobody else may be able to put one there, by owner, by mode or by a link."""

import os
import stat
from pathlib import Path

import pytest
from stub_cache import artifact_of, fill, lookup_in, record_of, settings_for, wanted

from jitspark.cache.folders import make_root, root_problem
from jitspark.cache.lookup import Lookup, open_roots
from jitspark.cache.runtime_library import find_runtime_library
from jitspark.cache.staging import staging
from jitspark.cache.store import ARTIFACT, RECORD, Layer, put, read_entry, set_aside
from jitspark.errors import CacheDirectoryError, EntryError, ToolchainError

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


def found(layer, entry):
    try:
        return read_entry(layer, entry.key, entry.toolchain, whole=True) is not None
    except EntryError:
        return False


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o777, 0o1777])
def test_a_root_that_others_may_write_to_is_left_out_and_said(tmp_path, warnings, mode):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(mode)

    roots = open_roots(settings_for(tmp_path / "cache", tmp_path, cache_path=(tmp_path / "cache",)))

    assert roots.layers == ()
    assert f"{mode:04o}" in warnings()[0]


def test_a_root_that_others_may_write_to_is_used_when_that_is_asked_for(entry, tmp_path):
    entry.layer.root.chmod(0o777)
    settings = settings_for(entry.layer.root, tmp_path, trust_writable_roots=True)

    assert Lookup(settings).find(entry.key, whole=True) is not None


@as_root
def test_a_root_of_another_user_is_left_out_and_said(tmp_path, warnings):
    (tmp_path / "cache").mkdir()
    os.chown(tmp_path / "cache", NOBODY, NOBODY)

    assert open_roots(settings_for(tmp_path / "cache", tmp_path)).layers == ()
    assert f"uid {NOBODY}" in warnings()[0]


@as_root
def test_a_link_that_belongs_to_another_user_is_no_root(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "link").symlink_to("cache")
    assert root_problem(tmp_path / "link", trust_writable=False) is None

    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)

    assert f"uid {NOBODY}" in root_problem(tmp_path / "link", trust_writable=False)


def ways_down(entry):
    """Every folder and file from the root's first folder to the artifact."""
    parts = (entry.directory / ARTIFACT).relative_to(entry.layer.root).parts
    return [entry.layer.root.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]


@pytest.mark.parametrize("depth", range(6))
def test_no_component_below_the_root_may_be_a_link(entry, depth):
    path = ways_down(entry)[depth]
    path.rename(entry.layer.root / "real")
    path.symlink_to(entry.layer.root / "real")

    assert not found(entry.layer, entry)


@pytest.mark.parametrize("depth", range(6))
def test_no_component_below_the_root_may_be_writable_by_others(entry, depth):
    ways_down(entry)[depth].chmod(0o777)

    assert not found(entry.layer, entry)
    assert found(Layer(entry.layer.root, writable=True, trusted=True), entry)


@as_root
@pytest.mark.parametrize("depth", range(6))
def test_no_component_below_the_root_may_be_another_users(entry, depth):
    os.chown(ways_down(entry)[depth], NOBODY, NOBODY)

    assert not found(entry.layer, entry)


@as_root
def test_a_root_that_is_swapped_after_its_first_check_is_noticed(entry):
    lookup = lookup_in(entry.layer)
    assert lookup.find(entry.key) is not None
    os.chown(entry.layer.root, NOBODY, NOBODY)

    assert lookup.find(entry.key) is None


@pytest.mark.parametrize("name", [ARTIFACT, RECORD])
@pytest.mark.parametrize("plant", ["pipe", "folder", "link to a file", "link to nothing"])
def test_what_is_planted_under_an_entrys_name_is_refused_without_blocking(entry, name, plant):
    path = entry.directory / name
    copy = path.rename(entry.layer.root / "copy")
    plants = {
        "pipe": lambda: os.mkfifo(path, 0o644),
        "folder": path.mkdir,
        "link to a file": lambda: path.symlink_to(copy),
        "link to nothing": lambda: path.symlink_to("nowhere"),
    }
    plants[plant]()

    assert not found(entry.layer, entry)


def test_a_link_below_the_root_is_never_written_through(tmp_path, templates):
    root, outside = tmp_path / "cache", tmp_path / "outside"
    item, layer = wanted(1)[0], Layer(root, writable=True)
    outside.mkdir()
    (root / "artifacts-v1").mkdir(parents=True)
    (root / "artifacts-v1" / f"{item.key.target}-{item.key.host}").symlink_to(outside)
    content = artifact_of(item, templates)

    with pytest.raises(CacheDirectoryError, match="a link or a file"):
        put(layer, item.key, record_of(item, content), content)
    assert set_aside(layer, item.key, "0" * 64) == "stuck"
    assert list(outside.iterdir()) == []
    assert list((root / "staging").iterdir()) == []


def test_a_staging_folder_that_is_a_link_is_not_used(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "staging").symlink_to("elsewhere")

    with pytest.raises(CacheDirectoryError), staging(tmp_path):
        pass
    assert list((tmp_path / "elsewhere").iterdir()) == []


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077])
def test_modes_do_not_depend_on_the_umask(tmp_path, templates, umask):
    before = os.umask(umask)
    try:
        make_root(tmp_path / "some" / "where" / "cache")
        fill(tmp_path / "some" / "where" / "cache", wanted(1), templates)
    finally:
        os.umask(before)

    below = list((tmp_path / "some").rglob("*"))
    folders = {stat.S_IMODE(path.stat().st_mode) for path in below if path.is_dir()}
    files = {stat.S_IMODE(path.stat().st_mode) for path in below if path.is_file()}
    assert (folders, files) == ({0o755}, {0o444})


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A runtime library in a cache root, where none is installed."""
    monkeypatch.setattr("jitspark.cache.runtime_library._installed", list)
    path = tmp_path / "cache" / "runtime-v1" / "cu13" / "libcute_dsl_runtime.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"library")
    return path


def library_found(tmp_path, **changes):
    try:
        return find_runtime_library(settings_for(None, tmp_path, cache_path=(tmp_path / "cache",), **changes)).path
    except ToolchainError:
        return None


def test_a_runtime_library_in_a_cache_root_is_found(library, tmp_path):
    assert library_found(tmp_path) == library


@pytest.mark.parametrize("depth", range(4))
def test_a_runtime_library_that_others_may_change_is_not_mapped(library, tmp_path, depth):
    (library, *library.parents)[depth].chmod(0o777)

    assert library_found(tmp_path) is None
    assert library_found(tmp_path, trust_writable_roots=True) == library


@pytest.mark.parametrize("depth", range(3))
def test_a_runtime_library_behind_a_link_is_not_mapped(library, tmp_path, depth):
    path = (library, *library.parents)[depth]
    path.rename(tmp_path / "real")
    path.symlink_to(tmp_path / "real")

    assert library_found(tmp_path) is None


def test_the_fallback_below_tmp_is_owner_checked():
    assert root_problem(Path("/tmp"), trust_writable=False) is not None
