"""A corpus of hostile packs: whatever is no pack is refused with one error, and nothing is left behind."""

import contextlib
import resource
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import stub_cache
import zstandard
from pack_fixtures import (
    compress,
    listed_as_they_are,
    members_of,
    refused,
    replace_size,
    tar_of,
    unpack,
    write_pack,
    write_tar,
)

from cache_tools.compression import TRAILER_BYTES
from cache_tools.manifest import Manifest, manifest_from_bytes, merkle_root
from jitspark.cache.record import MAX_RECORD_BYTES

SKIPPED = b"\x50\x2a\x4d\x18" + (40).to_bytes(4, "little") + b"jitspark"  # a frame that readers skip


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
def test_a_plain_tar_with_anything_but_entries_is_refused(tmp_path, layer, plain, what):
    members = members_of(plain)
    HOSTILE[what](members)

    refused(write_tar(tmp_path / "hostile.tar", members), layer)


@pytest.mark.parametrize("manifest", [lambda m: m, listed_as_they_are], ids=["right manifest", "own manifest"])
@pytest.mark.parametrize("what", HOSTILE)
def test_a_pack_with_anything_but_entries_is_refused(tmp_path, layer, packed, what, manifest):
    first, *members = members_of(packed)
    HOSTILE[what](members)

    refused(write_pack(tmp_path / "hostile.tar.zst", manifest([first, *members])), layer)


def test_the_members_that_are_made_hostile_are_accepted_unchanged(tmp_path, layer, packed, plain):
    again = write_pack(tmp_path / "again.tar.zst", listed_as_they_are(members_of(packed)))

    assert unpack(again, layer) == (3, 0)
    assert unpack(plain, layer) == (0, 3)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_extension_headers_are_refused(tmp_path, layer, plain, form):
    member, content = members_of(plain)[0]
    member.pax_headers = {"comment": "x"}

    refused(write_tar(tmp_path / "extended.tar", [(member, content)], form), layer)


def test_a_size_beyond_the_limit_is_refused_before_it_is_read(tmp_path, layer, plain):
    record = members_of(plain)[1][0]
    record.size = MAX_RECORD_BYTES + 1
    start = 512 + 512 * -(-members_of(plain)[0][0].size // 512)
    file = tmp_path / "oversize.tar"
    file.write_bytes(plain.read_bytes()[:start] + record.tobuf(tarfile.USTAR_FORMAT))

    assert f"{MAX_RECORD_BYTES + 1} bytes" in refused(file, layer)


def test_a_manifest_with_a_size_beyond_the_limit_is_refused(tmp_path, layer, packed):
    (member, content), *_ = members_of(packed)
    manifest = manifest_from_bytes(content, "")
    files = (*manifest.files[:-1], replace(manifest.files[-1], size=MAX_RECORD_BYTES + 1))
    content = Manifest(1, files, manifest.needs, merkle_root(files)).to_bytes()
    bad = [(replace_size(member, len(content)), content), *members_of(packed)[1:]]

    assert f"{MAX_RECORD_BYTES + 1} bytes" in refused(write_pack(tmp_path / "oversize.tar.zst", bad), layer)


def test_a_bomb_is_refused_after_its_first_blocks(tmp_path, layer):
    bomb = zstandard.ZstdCompressor(level=1).compressobj()
    content = b"".join(bomb.compress(bytes(2**24)) for _ in range(64)) + bomb.flush()  # 1 GiB in 33 kB
    file = tmp_path / "bomb.tar.zst"
    file.write_bytes(content + bytes(TRAILER_BYTES))

    with limited_memory(200 * 2**20):
        refused(file, layer)
        refused(compress(tmp_path / "zeros.tar.zst", bytes(2**26)), layer)


@pytest.mark.parametrize("item", [b"[]", b"{}", b'"a"', b"1", b'"' + "\U0001f600".encode() + b'"'])
def test_a_manifest_that_would_take_much_memory_is_refused_unread(tmp_path, layer, item):
    content = b'{"files":[%s],"version":1}' % b",".join([item] * 900_000)
    member = tarfile.TarInfo("MANIFEST.json")
    member.size, member.mode = len(content), 0o444

    with limited_memory(60 * 2**20):
        found = refused(write_pack(tmp_path / "large.tar.zst", [(member, content)]), layer)

    assert "more than a manifest can hold" in found


@contextlib.contextmanager
def limited_memory(more):
    """Whoever takes so much more memory fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_window_larger_than_ours_is_refused(tmp_path, layer, packed):
    parameters = zstandard.ZstdCompressionParameters.from_level(19, window_log=27, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = compressor.compress(tar_of(packed)) + compressor.flush()
    file = tmp_path / "window.tar.zst"
    file.write_bytes(frame + bytes(TRAILER_BYTES))

    assert "do not decompress" in refused(file, layer)


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_every_changed_byte_is_noticed(tmp_path, layer, request, form):
    content = request.getfixturevalue(form).read_bytes()
    damaged = tmp_path / "damaged"
    for place in range(0, len(content), 97 if form == "plain" else 29):
        damaged.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        refused(damaged, layer)


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_every_truncation_is_noticed(tmp_path, layer, request, form):
    content = request.getfixturevalue(form).read_bytes()
    short = tmp_path / "short"
    for length in [*range(0, len(content), 509 if form == "plain" else 101), len(content) - 1]:
        short.write_bytes(content[:length])
        refused(short, layer)


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_content_after_the_end_is_refused(tmp_path, layer, request, form):
    longer = tmp_path / "longer"
    longer.write_bytes(request.getfixturevalue(form).read_bytes() + b"\0")

    refused(longer, layer)


@pytest.mark.parametrize("what", ["a second frame", "a skipped frame", "more in the frame"])
def test_content_that_other_readers_would_see_or_skip_is_refused(tmp_path, layer, packed, what):
    frame = packed.read_bytes()[:-TRAILER_BYTES]
    more = {
        "a second frame": frame + frame,
        "a skipped frame": frame + b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"evil",
        "more in the frame": None,
    }[what]
    file = tmp_path / "more.tar.zst"
    if more is None:
        compress(file, tar_of(packed) + bytes(512))
    else:
        file.write_bytes(more + SKIPPED + bytes.fromhex(stub_cache.sha256(more)))

    assert "after the end" in refused(file, layer)


def test_a_file_that_is_no_pack_or_does_not_exist_is_refused(tmp_path, layer):
    (tmp_path / "text").write_text("no pack" * 1000)

    refused(tmp_path / "text", layer)
    refused(tmp_path / "missing.tar", layer)
    refused(tmp_path, layer)


@pytest.mark.parametrize("form", ["plain", "packed"])
def test_a_refusal_names_the_entry(tmp_path, layer, request, form):
    content = bytearray(tar_of(request.getfixturevalue(form)))
    place = content.index(b"\x7fELF") + 100
    content[place] ^= 1
    (tmp_path / "damaged.tar").write_bytes(content)
    named = "artifacts-v1/sm_90a"

    assert named in refused(tmp_path / "damaged.tar", layer)
    assert form == "plain" or named in refused(compress(tmp_path / "damaged.tar.zst", content), layer)


@pytest.mark.parametrize("version", [2, 99])
def test_a_newer_version_is_refused_as_such(tmp_path, layer, packed, version):
    (member, content), *members = members_of(packed)
    newer = content.replace(b'"version":1}', b'"version":%d}' % version)
    bad = [(replace_size(member, len(newer)), newer), *members]

    assert f"a pack of version {version}" in refused(write_pack(tmp_path / "newer.tar.zst", bad), layer)


def test_a_newer_layout_is_refused_as_such(tmp_path, layer, packed):
    first, *members = members_of(packed)
    for member, _ in members:
        member.name = member.name.replace("artifacts-v1", "artifacts-v2")
    newer = write_pack(tmp_path / "newer.tar.zst", listed_as_they_are([first, *members]))

    assert "another version's layout" in refused(newer, layer)
    assert "another version's layout" in refused(write_tar(tmp_path / "newer.tar", members), layer)
