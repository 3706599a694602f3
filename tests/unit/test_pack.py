"""Packs: the same bytes for the same entries, and nothing but entries out of any file."""

import os
import tarfile

import pytest
import stub_cache
from pack_fixtures import RUNTIME, everything_below, members_of, refused, replace_size, unpack, write_tar

from cache_tools.archive import MANIFEST
from cache_tools.contents import Runtime
from cache_tools.pack import pack
from jitspark.cache.runtime_library import find_runtime_library
from jitspark.cache.store import Layer, entry_directory, keys_in, read_entry
from jitspark.errors import CacheDirectoryError, EntryError, PackError
from jitspark.settings import Settings


def test_equal_entries_make_equal_packs_whatever_their_order_and_files(tmp_path, entries, packed):
    for entry in entries:
        os.utime(entry.directory / "kernel.so", (1, 1))
    again = tmp_path / "again.tar.zst"
    pack(again, [*reversed(entries), *entries])

    assert again.read_bytes() == packed.read_bytes()


def test_any_tar_program_reads_a_pack(packed, entries):
    names = [member.name for member, _ in members_of(packed)]

    assert names == sorted(names)
    assert names[0] == MANIFEST
    assert len(names) == 2 * len(entries) + 1
    assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m, _ in members_of(packed)} == {(0, 0, 0, "", 0o444)}


def test_what_is_unpacked_equals_what_was_packed(layer, packed, entries):
    done = unpack(packed, layer)

    assert done == (3, 0)
    assert everything_below(layer.root) == everything_below(entries[0].layer.root)


def test_a_good_entry_is_never_overwritten(layer, packed):
    unpack(packed, layer)
    before = {path: path.stat().st_ino for path in layer.root.rglob("*")}
    done = unpack(packed, layer)

    assert done == (0, 3)
    assert {
        path: path.stat().st_ino for path in layer.root.rglob("*") if path.name != "staging"
    }.items() <= before.items()


def test_a_damaged_entry_is_replaced(layer, packed):
    unpack(packed, layer)
    key, toolchain = next(keys_in(layer))
    artifact = entry_directory(layer.root, key, toolchain) / "kernel.so"
    artifact.chmod(0o644)
    artifact.write_bytes(b"damaged")
    done = unpack(packed, layer)

    assert done == (1, 2)
    assert read_entry(layer, key, toolchain).read_artifact()


def test_a_damaged_entry_is_not_packed_and_leaves_no_file(tmp_path, templates):
    (entry,) = stub_cache.fill(tmp_path / "root", stub_cache.wanted(1), templates, stub_cache.other_toolchain())
    (entry.directory / "kernel.so").chmod(0o644)
    (entry.directory / "kernel.so").write_bytes(b"damaged")
    (tmp_path / "packs").mkdir()

    with pytest.raises(EntryError):
        pack(tmp_path / "packs" / "x.tar", [entry])
    assert not any((tmp_path / "packs").iterdir())


def test_nothing_to_pack_is_an_error(tmp_path):
    with pytest.raises(PackError):
        pack(tmp_path / "x.tar", [])


def test_a_pack_that_cannot_be_written_is_one_error(tmp_path, entries):
    with pytest.raises(PackError, match="No such file"):
        pack(tmp_path / "missing" / "x.tar", entries)


def test_a_root_that_cannot_be_written_to_is_one_error(tmp_path, packed):
    with pytest.raises(CacheDirectoryError):
        unpack(packed, Layer(tmp_path / "missing", writable=True))


@pytest.fixture
def runtime():
    return Runtime("cu13", b"\x7fELF" + bytes(1000), b"Whoever passes this on passes on this text.")


def test_a_pack_carries_the_runtime_library_and_its_licence_to_where_it_is_found(
    tmp_path, layer, entries, runtime, monkeypatch
):
    monkeypatch.setattr("jitspark.toolchain.runtime_library", lambda: None)  # none is installed
    pack(tmp_path / "with.tar.zst", entries, runtime)
    for _ in range(2):
        unpack(tmp_path / "with.tar.zst", layer)

    assert (layer.root / RUNTIME).read_bytes() == runtime.library
    assert (layer.root / RUNTIME).with_name("LICENSE").read_bytes() == runtime.licence
    assert find_runtime_library(Settings(cache_dir=layer.root)).path == layer.root / RUNTIME


@pytest.mark.parametrize("name", ["libcute_dsl_runtime.so", "LICENSE"])
def test_another_runtime_library_is_refused_and_nothing_unpacked(tmp_path, layer, entries, runtime, name):
    pack(tmp_path / "with.tar.zst", entries, runtime)
    there = (layer.root / RUNTIME).with_name(name)
    there.parent.mkdir(parents=True)
    there.write_bytes(b"another")

    with pytest.raises(PackError) as raised:
        unpack(tmp_path / "with.tar.zst", layer)

    assert raised.value.where == str(there) and "another runtime library" in raised.value.found
    assert everything_below(layer.root) == {str(there.relative_to(layer.root)): b"another"}


def with_library(members, content, digest):
    """A plain tar's members, with a runtime library as it was packed before there were manifests."""
    for name, each in ((RUNTIME, content), (f"{RUNTIME}.sha256", digest)):
        member = replace_size(tarfile.TarInfo(name), len(each))
        member.mode = 0o444
        members.append((member, each))
    return members


def test_a_plain_tar_brings_its_runtime_library_if_the_digest_is_right(tmp_path, layer, plain):
    content = b"\x7fELF" + bytes(1000)
    good = stub_cache.sha256(content).encode()
    damaged = write_tar(tmp_path / "bad.tar", with_library(members_of(plain), content + b"x", good))

    assert "runtime library" in refused(damaged, layer)
    assert unpack(write_tar(tmp_path / "good.tar", with_library(members_of(plain), content, good)), layer) == (3, 0)
    assert (layer.root / RUNTIME).read_bytes() == content
