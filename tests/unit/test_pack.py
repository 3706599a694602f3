"""Packs: the same bytes for the same entries, and nothing but entries out of any file."""

import io
import os
import tarfile

import pytest
import stub_cache

from cache_tools.pack import pack
from cache_tools.unpack import Unpacked, unpack
from jitspark.errors import CacheDirectoryError, EntryError, PackError
from jitspark.record import MAX_RECORD_BYTES
from jitspark.runtime_library import find_runtime_library
from jitspark.settings import Settings
from jitspark.store import Layer, entry_directory, keys_in, read_entry

RUNTIME = "runtime-v1/cu13/libcute_dsl_runtime.so"


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return stub_cache.make_templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture(scope="module")
def entries(tmp_path_factory, templates):
    """Three entries of two kernels."""
    items = [*stub_cache.wanted(2), *stub_cache.wanted(1, kernel="other")]
    root = tmp_path_factory.mktemp("cache") / "root"
    return stub_cache.fill(root, items, templates, stub_cache.other_toolchain())


@pytest.fixture(scope="module")
def packed(tmp_path_factory, entries):
    file = tmp_path_factory.mktemp("pack") / "good.tar"
    pack(file, entries)
    return file


@pytest.fixture
def layer(tmp_path):
    (tmp_path / "root").mkdir()
    return Layer(tmp_path / "root", writable=True)


def everything_below(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def members_of(file):
    with tarfile.open(file) as archive:
        return [(member, archive.extractfile(member).read()) for member in archive]


def write_tar(file, members, form=tarfile.USTAR_FORMAT):
    with tarfile.open(file, "w", format=form) as archive:
        for member, content in members:
            archive.addfile(member, io.BytesIO(content))
    return file


def refused(file, layer):
    """The refusal's text; the cache has been left as it was."""
    with pytest.raises(PackError) as refusal:
        unpack(file, layer)
    assert not everything_below(layer.root)
    return str(refusal.value)


def test_equal_entries_make_equal_packs_whatever_their_order_and_files(tmp_path, entries, packed):
    for entry in entries:
        os.utime(entry.directory / "kernel.so", (1, 1))
    again = tmp_path / "again.tar"
    pack(again, [*reversed(entries), *entries])

    assert again.read_bytes() == packed.read_bytes()


def test_any_tar_program_reads_a_pack(packed, entries):
    names = [member.name for member, _ in members_of(packed)]

    assert names == sorted(names)
    assert len(names) == 2 * len(entries)
    assert {(m.mtime, m.uid, m.gid, m.uname, m.mode) for m, _ in members_of(packed)} == {(0, 0, 0, "", 0o444)}


def test_what_is_unpacked_equals_what_was_packed(layer, packed, entries):
    done = unpack(packed, layer)

    assert done == Unpacked(new=3, kept=0)
    assert everything_below(layer.root) == everything_below(entries[0].layer.root)


def test_a_good_entry_is_never_overwritten(layer, packed):
    unpack(packed, layer)
    before = {path: path.stat().st_ino for path in layer.root.rglob("*")}
    done = unpack(packed, layer)

    assert done == Unpacked(new=0, kept=3)
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

    assert done == Unpacked(new=1, kept=2)
    assert read_entry(layer, key, toolchain).read_artifact()


def changed(**attributes):
    def change(members):
        for name, value in attributes.items():
            setattr(members[0][0], name, value)

    return change


def inserted(name, **attributes):
    def change(members):
        member = tarfile.TarInfo(name)
        for attribute, value in {"mode": 0o444, **attributes}.items():
            setattr(member, attribute, value)
        members.insert(0, (member, b""))

    return change


HOSTILE = {
    "a symbolic link": changed(type=tarfile.SYMTYPE, linkname="/etc/passwd", size=0),
    "a hard link": changed(type=tarfile.LNKTYPE, linkname="/etc/passwd", size=0),
    "a device": changed(type=tarfile.CHRTYPE, size=0),
    "a pipe": changed(type=tarfile.FIFOTYPE, size=0),
    "a folder": inserted("artifacts-v1", type=tarfile.DIRTYPE, mode=0o755),
    "a path upwards": inserted("../evil"),
    "a path upwards within an entry's": lambda m: changed(name=m[0][0].name.replace("/kernel.so", "/../kernel.so"))(m),
    "an absolute path": inserted("/tmp/evil"),
    "an unknown file": inserted("artifacts-v1/readme"),
    "a staging file": inserted("staging/x/kernel.so"),
    "a mode": changed(mode=0o777),
    "a set-uid mode": changed(mode=0o4444),
    "an owner": changed(uid=1000),
    "an owner's name": changed(uname="root"),
    "a time": changed(mtime=1),
    "a duplicate": lambda members: members.insert(2, members[0]),
    "another order": lambda members: members.reverse(),
    "an artifact without its record": lambda members: members.pop(1),
    "a record without its artifact": lambda members: members.pop(0),
    "another entry's record": lambda m: m.__setitem__(1, (m[1][0], m[3][1].ljust(m[1][0].size)[: m[1][0].size])),
    "nothing": lambda members: members.clear(),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_pack_with_anything_but_entries_is_refused(tmp_path, layer, packed, what):
    members = members_of(packed)
    HOSTILE[what](members)

    refused(write_tar(tmp_path / "hostile.tar", members), layer)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_extension_headers_are_refused(tmp_path, layer, packed, form):
    member, content = members_of(packed)[0]
    member.pax_headers = {"comment": "x"}

    refused(write_tar(tmp_path / "extended.tar", [(member, content)], form), layer)


def test_a_size_beyond_the_limit_is_refused_before_it_is_read(tmp_path, layer, packed):
    record = members_of(packed)[1][0]
    record.size = MAX_RECORD_BYTES + 1
    file = tmp_path / "oversize.tar"
    file.write_bytes(
        packed.read_bytes()[: 512 + 512 * -(-members_of(packed)[0][0].size // 512)] + record.tobuf(tarfile.USTAR_FORMAT)
    )

    assert f"{MAX_RECORD_BYTES + 1} bytes" in refused(file, layer)


def test_every_changed_byte_is_noticed(tmp_path, layer, packed):
    content = packed.read_bytes()
    for place in range(0, len(content), 97):
        damaged = tmp_path / "damaged.tar"
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        refused(damaged, layer)


def test_every_truncation_is_noticed(tmp_path, layer, packed):
    content = packed.read_bytes()
    for length in [*range(0, len(content), 509), len(content) - 1]:
        short = tmp_path / "short.tar"
        short.write_bytes(content[:length])
        refused(short, layer)


def test_content_after_the_end_is_refused(tmp_path, layer, packed):
    longer = tmp_path / "longer.tar"
    longer.write_bytes(packed.read_bytes() + b"\0")

    refused(longer, layer)


def test_a_file_that_is_no_pack_or_does_not_exist_is_refused(tmp_path, layer):
    (tmp_path / "text").write_text("no pack" * 1000)

    refused(tmp_path / "text", layer)
    refused(tmp_path / "missing.tar", layer)


def test_a_refusal_names_the_entry(tmp_path, layer, packed):
    content = bytearray(packed.read_bytes())
    content[512 + 100] ^= 1
    (tmp_path / "damaged.tar").write_bytes(content)

    assert "artifacts-v1/sm_90a" in refused(tmp_path / "damaged.tar", layer)


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


def test_a_pack_carries_the_runtime_library_to_where_it_is_found(tmp_path, layer, entries, monkeypatch):
    monkeypatch.setattr("jitspark.toolchain.runtime_library", lambda: None)  # none is installed
    library = tmp_path / "library.so"
    library.write_bytes(b"\x7fELF" + bytes(1000))
    pack(tmp_path / "with.tar", entries, ("cu13", library))
    for _ in range(2):
        unpack(tmp_path / "with.tar", layer)

    assert (layer.root / RUNTIME).read_bytes() == library.read_bytes()
    assert find_runtime_library(Settings(cache_dir=layer.root)).path == layer.root / RUNTIME


def test_a_damaged_runtime_library_is_refused(tmp_path, layer, entries):
    library = tmp_path / "library.so"
    library.write_bytes(bytes(1000))
    pack(tmp_path / "with.tar", entries, ("cu13", library))
    content = bytearray((tmp_path / "with.tar").read_bytes())
    content[-3000] ^= 1
    (tmp_path / "with.tar").write_bytes(content)

    assert "runtime library" in refused(tmp_path / "with.tar", layer)
