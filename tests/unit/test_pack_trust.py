"""Signatures: who may vouch for a pack, and that nothing passes that was changed after it was signed."""

import subprocess

import pytest
from pack_fixtures import everything_below, filled, make_keys
from stub_cache import artifact_of, fill, other_toolchain, record_of, wanted

from cache_tools.archive import MANIFEST, SIGNATURE, write_end, write_member
from cache_tools.contents import contents_of, pack_members
from cache_tools.opened import opened_pack
from cache_tools.pack import Form, pack
from cache_tools.signed_layers import unsigned_files
from cache_tools.signing import ANY, Trust, key_id, private_key, public_key, signature_of, trust_in
from cache_tools.unpack import packed_items, unpack
from cache_tools.verify_source import verify_source
from jitspark.cache.store import Layer, put
from jitspark.errors import EntryError, PackError, UsageError
from jitspark.settings import Settings


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def other_keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("keys"), "other")


@pytest.fixture(scope="module")
def entries(tmp_path_factory, templates):
    return filled(tmp_path_factory.mktemp("cache") / "root", templates, 1)


@pytest.fixture(scope="module")
def signed(tmp_path_factory, entries, keys):
    file = tmp_path_factory.mktemp("pack") / "signed.tar.zst"
    pack(file, entries, form=Form(sign=keys[0]))
    return file


@pytest.fixture
def layer(tmp_path):
    (tmp_path / "root").mkdir()
    return Layer(tmp_path / "root", writable=True)


def trusting(keys):
    return trust_in([keys[1]], allow_unsigned=False)


def read_all(file, trust):
    with opened_pack(file, trust) as opened:
        return list(packed_items(opened, str(file)))


def refused(file, layer, trust):
    with pytest.raises(PackError) as refusal:
        unpack(file, layer, trust)
    assert not everything_below(layer.root)
    return str(refusal.value)


def changed_at(content, place):
    return content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]


def plain_members(entries, keys):
    """A signed pack's members, for a pack without compression."""
    return list(pack_members(contents_of(entries, None, "test", keys[0])))


def write_plain(file, members):
    with file.open("wb") as stream:
        for name, content in members:
            write_member(stream, name, content)
        write_end(stream)
    return file


def test_a_signed_pack_is_accepted_with_its_key_and_keeps_its_manifest(layer, signed, keys):
    done = unpack(signed, layer, trusting(keys))

    assert (done.new, done.signer) == (1, key_id(public_key(keys[1])))
    assert len([path for path in everything_below(layer.root) if path.startswith("packs-v1/")]) == 2


def test_a_signed_pack_is_refused_without_its_key(layer, signed, other_keys):
    assert "Name the signer's public key" in refused(signed, layer, Trust())
    assert "found a signature of the key" in refused(signed, layer, trusting(other_keys))


def test_an_unsigned_pack_needs_a_word(tmp_path, layer, entries, keys):
    pack(tmp_path / "unsigned.tar.zst", entries)

    assert "a pack that nobody signed" in refused(tmp_path / "unsigned.tar.zst", layer, Trust())
    assert "a pack that nobody signed" in refused(tmp_path / "unsigned.tar.zst", layer, trusting(keys))
    assert unpack(tmp_path / "unsigned.tar.zst", layer, ANY).new == 1


def test_a_named_key_outweighs_the_word_for_unsigned_packs(tmp_path, layer, entries, keys):
    pack(tmp_path / "unsigned.tar.zst", entries)

    refused(tmp_path / "unsigned.tar.zst", layer, trust_in([keys[1]], allow_unsigned=True))


def test_every_changed_byte_of_a_signed_pack_is_refused(tmp_path, signed, keys):
    content, damaged, trust = signed.read_bytes(), tmp_path / "damaged", trusting(keys)
    for place in range(len(content)):
        damaged.write_bytes(changed_at(content, place))
        with pytest.raises(PackError):
            read_all(damaged, trust)
    assert len(content) > 1500


@pytest.mark.parametrize("which", [MANIFEST, SIGNATURE])
def test_every_changed_byte_of_manifest_and_signature_is_refused(tmp_path, entries, keys, which):
    members, trust = dict(plain_members(entries, keys)), trusting(keys)
    assert read_all(write_plain(tmp_path / "plain", members.items()), trust)
    for place in range(len(members[which])):
        changed = {**members, which: changed_at(members[which], place)}
        with pytest.raises(PackError):
            read_all(write_plain(tmp_path / "plain", changed.items()), trust)


def test_a_changed_file_is_refused_by_its_name_also_with_a_trailer_of_its_own(tmp_path, layer, entries, keys):
    members = plain_members(entries, keys)
    for number, (name, content) in enumerate(members[2:], 2):
        for place in range(0, len(content), 257):
            members[number] = (name, changed_at(content, place))
            assert name in refused(write_plain(tmp_path / "plain", members), layer, trusting(keys))
        members[number] = (name, content)


def test_a_manifest_signed_by_an_attacker_is_not_a_trusted_ones(tmp_path, layer, entries, keys, other_keys):
    members = dict(plain_members(entries, keys))
    theirs = signature_of(private_key(other_keys[0]), members[MANIFEST])
    trusted_id = key_id(public_key(keys[1])).encode()
    forged = theirs.replace(theirs.split()[1], trusted_id)

    for signature in (theirs, forged):
        file = write_plain(tmp_path / "plain", {**members, SIGNATURE: signature}.items())
        refused(file, layer, trusting(keys))


def test_a_file_more_or_less_than_the_manifest_lists_is_refused(tmp_path, layer, templates, entries, keys):
    members = plain_members(entries, keys)
    more = plain_members(filled(tmp_path / "more", templates, 2), keys)

    refused(write_plain(tmp_path / "p", [*members[:2], *more[2:]]), layer, trusting(keys))
    refused(write_plain(tmp_path / "p", members[:-1]), layer, trusting(keys))
    refused(write_plain(tmp_path / "p", [*members, ("runtime-v1/cu13/LICENSE", b"x")]), layer, trusting(keys))


BAD_KEYS = {
    "missing": None,
    "empty": b"",
    "text": b"no key at all",
    "half": b"-----BEGIN PUBLIC KEY-----\nMCowBQYDK2VwAyEA\n-----END PUBLIC KEY-----\n",
    "huge": b"-----BEGIN PUBLIC KEY-----\n" + b"A" * 100_000,
}


@pytest.mark.parametrize("what", BAD_KEYS)
def test_an_unusable_key_file_is_one_error(tmp_path, entries, what):
    file = tmp_path / "key"
    if BAD_KEYS[what] is not None:
        file.write_bytes(BAD_KEYS[what])

    with pytest.raises(UsageError, match="--trust"):
        public_key(file)
    with pytest.raises(UsageError, match="--sign"):
        pack(tmp_path / "x.tar.zst", entries, form=Form(sign=file))
    assert not (tmp_path / "x.tar.zst").exists()


def test_keys_of_other_kinds_and_the_wrong_half_are_refused(tmp_path, keys):
    subprocess.run(
        ["openssl", "genpkey", "-algorithm", "x25519", "-out", tmp_path / "x.pem"], check=True, capture_output=True
    )
    with pytest.raises(UsageError, match="another kind"):
        private_key(tmp_path / "x.pem")
    with pytest.raises(UsageError):
        public_key(keys[0])


def test_a_key_that_openssl_made_signs(tmp_path, entries):
    key, public = tmp_path / "k.pem", tmp_path / "k.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    pack(tmp_path / "x.tar.zst", entries, form=Form(sign=key))

    assert read_all(tmp_path / "x.tar.zst", trust_in([public], allow_unsigned=False))


@pytest.mark.parametrize("section", [b".debug_line", b".debug_info", b".nv_debug_line_sass"])
def test_an_entry_with_debug_information_is_not_signed(tmp_path, templates, keys, section):
    (item,) = wanted(1)
    content = artifact_of(item, templates) + section + b"\0/home/somebody/kernel.py\0"
    (tmp_path / "root").mkdir()
    entry = put(Layer(tmp_path / "root", writable=True), item.key, record_of(item, content, other_toolchain()), content)

    with pytest.raises(EntryError, match="debug information"):
        pack(tmp_path / "x.tar.zst", [entry], form=Form(sign=keys[0]))
    assert not (tmp_path / "x.tar.zst").exists()
    pack(tmp_path / "x.tar.zst", [entry])


def test_a_cache_is_verified_against_the_manifests_it_keeps(layer, signed, keys, templates):
    unpack(signed, layer, trusting(keys))
    settings = Settings(cache_dir=layer.root)

    good = verify_source(None, trusting(keys), None, settings)
    (added,) = fill(layer.root, wanted(1, start=50), templates, other_toolchain())
    grown = verify_source(layer.root, trusting(keys), None, settings)

    assert (good.entries, good.bad, good.signed) == (1, (), True)
    assert {bad.where for bad in grown.bad} == {str(added.directory / name) for name in ("kernel.so", "record.json")}


@pytest.mark.parametrize("which", ["*.json", "*.sig"])
def test_a_kept_manifest_that_was_changed_vouches_for_nothing(layer, signed, keys, which):
    unpack(signed, layer, trusting(keys))
    (kept,) = layer.root.glob(f"packs-v1/{which}")
    content = kept.read_bytes()
    for place in range(0, len(content), 7):
        kept.chmod(0o644)
        kept.write_bytes(changed_at(content, place))
        assert len(list(unsigned_files([layer], trusting(keys)))) == 2


def test_a_forged_entry_with_a_right_record_is_noticed(layer, signed, keys, templates):
    """Whoever can write a whole new entry still cannot sign it."""
    unpack(signed, layer, trusting(keys))
    (item,) = wanted(1)
    content = artifact_of(item, templates) + b"evil"
    (folder,) = layer.root.glob("artifacts-v1/*/*/*/*")
    for name, each in (("kernel.so", content), ("record.json", record_of(item, content, other_toolchain()).to_bytes())):
        (folder / name).chmod(0o644)
        (folder / name).write_bytes(each)

    result = verify_source(layer.root, trusting(keys), None, Settings(cache_dir=layer.root))

    assert [bad.found for bad in result.bad] == ["other bytes than were signed"] * 2
