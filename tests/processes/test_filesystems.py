"""File systems on bad days: full, read-only, forbidden, stale, busy.

Work goes on from memory, or one clear error says why; there is never a partial entry.
"""

import contextlib
import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from other_user import as_nobody
from step_faults import every_step, failed_at
from stub_cache import artifact_of, fill, lookup_in, number_of, record_of, settings_for, stub_command, wanted

from jitspark.building.build import build
from jitspark.cache.loader import Loader
from jitspark.cache.lookup import Lookup, open_roots
from jitspark.cache.store import Layer, keys_in, put, read_entry
from jitspark.errors import CacheDirectoryError, EntryError, JitsparkError

ITEM = wanted(1)[0]
ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EBUSY, errno.ENOENT, errno.EIO)
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def entries(layer):
    """What is there, all of it whole; a partial entry fails the test."""
    found = [read_entry(layer, key, toolchain, whole=True) for key, toolchain in keys_in(layer)]
    assert None not in found, "a partial entry"
    return found


@pytest.fixture
def layer(memory_path):
    (memory_path / "cache").mkdir()
    return Layer(memory_path / "cache", writable=True)


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_publishing_with_any_step_failing_publishes_or_says_why(layer, templates, error):
    content = artifact_of(ITEM, templates)
    record = record_of(ITEM, content)

    def publish():
        try:
            return put(layer, ITEM.key, record, content).where
        except CacheDirectoryError as problem:
            return "refused" if str(layer.root) in problem.where else f"nowhere: {problem}"

    def run(number):
        shutil.rmtree(layer.root)
        layer.root.mkdir()
        result, struck = failed_at(publish, number, error)
        assert len(entries(layer)) == 1 or result == "refused"
        assert not result.startswith("nowhere")
        return struck

    assert every_step(run) > 15


@pytest.mark.parametrize("error", ERRORS, ids=errno.errorcode.get)
def test_looking_up_with_any_step_failing_is_a_hit_or_a_miss(layer, templates, error):
    fill(layer.root, [ITEM], templates)
    seen = set()

    def look():
        return lookup_in(layer).find(ITEM.key, whole=True) is not None

    def run(number):
        result, struck = failed_at(look, number, error)
        seen.add(result)
        assert len(entries(layer)) == 1, "a good entry was set aside"
        return struck

    assert every_step(run) > 5
    assert "True" in seen


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOENT], ids=errno.errorcode.get)
def test_a_build_with_any_step_failing_ends_with_the_entry_or_one_typed_error(layer, templates, tmp_path, error):
    settings = settings_for(layer.root, tmp_path)
    toolchain = Lookup(settings).toolchain  # asks the linker for its version, before anything fails

    def whole_build():
        lookup = Lookup(settings, toolchain=toolchain)
        report = build([ITEM], lookup, settings, command=stub_command(templates))
        return "entry" if report.entries else type(next(iter(report.failed.values()))).__name__

    def typed():
        try:
            return whole_build()
        except JitsparkError as problem:
            return type(problem).__name__

    seen = set()
    for number in range(1, 120, 5):
        shutil.rmtree(layer.root)
        layer.root.mkdir()
        result, _ = failed_at(typed, number, error)
        seen.add(result)
        entries(layer)
    assert "entry" in seen
    assert len(seen) > 1, "no step was struck where it hurts"
    assert seen <= {"entry", "CacheDirectoryError", "ToolchainError", "CompileError"}


@contextlib.contextmanager
def tmpfs(path, options):
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"tmpfs cannot be mounted: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def built_on(root, tmp_path, templates):
    """Build and run one key with this root; whether it was published."""
    settings = settings_for(root, tmp_path)
    report = build([ITEM], Lookup(settings), settings, command=stub_command(templates))
    kernel = Loader(settings).load([report.entries[ITEM.key]])[0]
    assert kernel.function() == number_of(ITEM)
    return not report.unpublished


@pytest.mark.parametrize("kind", ["pages", "inodes"])
def test_a_full_disk_at_every_step_keeps_the_kernel_in_memory_and_no_partial_entry(tmp_path, templates, kind):
    published = []
    for free in range(1, 16):
        options = f"size={4 * free}k,mode=755" if kind == "pages" else f"nr_inodes={free},mode=755"
        with tmpfs(tmp_path / f"{kind}{free}", options) as root:
            published.append(built_on(root, tmp_path, templates))
            assert len(entries(Layer(root, writable=True))) == published[-1]
            assert not any((root / "staging").glob("*"))

    assert published == sorted(published)
    assert set(published) == {False, True}


def test_a_temporary_directory_without_space_is_one_clear_error_and_is_not_remembered(tmp_path, templates, monkeypatch):
    with tmpfs(tmp_path / "full", "size=16k,mode=755") as full:
        (full / "filling").write_bytes(b"x" * 8192)
        monkeypatch.setattr("tempfile.tempdir", str(full))
        (tmp_path / "cache").mkdir()
        settings = settings_for(tmp_path / "cache", tmp_path)
        lookup = Lookup(settings)

        report = build([ITEM], lookup, settings, command=stub_command(templates))

        assert len(report.failed) == 1
        assert not list((tmp_path / "cache").glob("failures/*"))


def test_a_read_only_mount_serves_and_is_not_written_to(tmp_path, templates):
    with tmpfs(tmp_path / "mount", "size=1m,mode=755") as root:
        fill(root, [ITEM], templates)
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        settings = settings_for(None, tmp_path, cache_path=(root,))
        first, second = wanted(2)
        lookup = Lookup(settings)

        report = build([first, second], lookup, settings, command=stub_command(templates))

        assert (report.hits, len(report.compiled)) == (1, 1)
        assert report.entries[second.key].layer is None


def test_a_writable_root_on_a_read_only_mount_means_memory_with_one_warning(tmp_path, templates, warnings):
    with tmpfs(tmp_path / "mount", "size=1m,mode=755") as root:
        fill(root, [ITEM], templates)
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        for _ in range(2):
            assert not Lookup(settings_for(root, tmp_path)).roots.writable

    assert len(warnings()) == 1


def test_a_mount_that_forbids_execution_does_not_stop_a_kernel(tmp_path, templates):
    with tmpfs(tmp_path / "mount", "size=1m,noexec,mode=755") as root:
        assert built_on(root, tmp_path, templates)


def passable(path):
    """Let other users through to a test's folder."""
    for folder in (path, *path.parents):
        if str(folder) not in ("/", "/tmp", "/dev", "/dev/shm"):
            folder.chmod(0o755)


@as_root
def test_another_user_hits_roots_entries_and_keeps_the_rest_in_memory(tmp_path, layer, templates):
    fill(layer.root, [ITEM], templates)
    passable(tmp_path)
    passable(layer.root)
    settings = settings_for(layer.root, tmp_path, cache_path=(layer.root,))

    def look():
        lookup = Lookup(settings)
        return lookup.find(ITEM.key, whole=True) is not None, lookup.roots.writable

    assert as_nobody(look) == "(True, None)"


@as_root
@pytest.mark.parametrize("mode", [0o700, 0o711, 0o000])
def test_an_entry_that_another_user_may_not_read_is_a_miss(tmp_path, layer, templates, mode):
    entry = fill(layer.root, [ITEM], templates)[0]
    passable(tmp_path)
    passable(layer.root)
    entry.directory.chmod(mode)

    assert as_nobody(lambda: lookup_in(Layer(layer.root, writable=False)).find(ITEM.key, whole=True)) == "None"
    assert entry.read_artifact()


@as_root
def test_publishing_where_another_user_may_not_write_says_so(tmp_path, layer, templates):
    passable(tmp_path)
    passable(layer.root)
    content = artifact_of(ITEM, templates)
    record = record_of(ITEM, content)

    assert "CacheDirectoryError" in as_nobody(lambda: put(layer, ITEM.key, record, content))
    assert as_nobody(lambda: open_roots(settings_for(layer.root, tmp_path)).writable) == "None"


def test_an_artifact_that_cannot_be_read_later_is_one_typed_error(layer, templates, monkeypatch):
    entry = fill(layer.root, [ITEM], templates)[0]

    def stale(*_args, **_kwargs):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr("jitspark.cache.folders.os.read", stale)
    with pytest.raises(EntryError, match=r"[Ss]tale"):
        entry.read_artifact()


def test_a_stale_handle_that_a_second_look_cures_is_a_hit(layer, templates, monkeypatch):
    entry = fill(layer.root, [ITEM], templates)[0]
    real, calls = os.open, []

    def stale_once(*args, **options):
        calls.append(args)
        if len(calls) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(*args, **options)

    monkeypatch.setattr("jitspark.cache.folders.os.open", stale_once)

    assert entry.read_artifact()


def test_the_lock_directory_on_a_full_disk_doubles_work_at_worst(tmp_path, layer, templates):
    with tmpfs(tmp_path / "locks", "nr_inodes=1,mode=700") as locks:
        settings = settings_for(layer.root, tmp_path, lock_dir=Path(locks))

        report = build(wanted(3), Lookup(settings), settings, command=stub_command(templates))

    assert len(report.compiled) == 3
