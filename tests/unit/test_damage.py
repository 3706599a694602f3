"""Whatever happens to an entry's bytes, the entry is refused or harmless, and nothing crashes."""

import errno
import os
import shutil
import time

import pytest
from stub_cache import artifact_of, fill, lookup_in, number_of, record_of, settings_for, stub_command, wanted

from jitspark.building.build import build_and_load
from jitspark.cache.loader import Loader
from jitspark.cache.lookup import Lookup
from jitspark.cache.record import check_library
from jitspark.cache.store import ARTIFACT, RECORD, Entry, Layer, put, read_entry
from jitspark.errors import EntryError

KINDS = (ARTIFACT, RECORD)


def writable_copy(entry, name):
    path = entry.directory / name
    path.chmod(0o644)
    return path


def is_refused(entry):
    try:
        return read_entry(entry.layer, entry.key, entry.toolchain, whole=True) is None
    except EntryError:
        return True


def test_the_entry_is_good_before_it_is_damaged(entry):
    assert not is_refused(entry)


@pytest.mark.parametrize("name", KINDS)
def test_a_flipped_bit_in_any_byte_is_refused(entry, name):
    path = writable_copy(entry, name)
    content = path.read_bytes()
    accepted = []
    with path.open("r+b", buffering=0) as stream:
        for index, byte in enumerate(content):
            os.pwrite(stream.fileno(), bytes([byte ^ (1 << index % 8)]), index)
            if not is_refused(entry):
                accepted.append(index)
            os.pwrite(stream.fileno(), bytes([byte]), index)

    assert len(content) > 500
    assert not accepted
    assert not is_refused(entry)


@pytest.mark.parametrize("name", KINDS)
def test_a_truncation_at_any_length_is_refused(entry, name):
    path = writable_copy(entry, name)
    accepted = []
    for length in reversed(range(path.stat().st_size)):
        os.truncate(path, length)
        if not is_refused(entry):
            accepted.append(length)

    assert not accepted


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("more", [b"\0", b"\n", b"x" * 5000])
def test_bytes_at_the_end_are_refused(entry, name, more):
    with writable_copy(entry, name).open("ab") as stream:
        stream.write(more)

    assert is_refused(entry)


@pytest.mark.parametrize("names", [(ARTIFACT,), (RECORD,), (ARTIFACT, RECORD)], ids="+".join)
@pytest.mark.parametrize("other", ["same kernel", "other kernel"])
def test_another_good_entry_under_this_key_is_refused(entry, templates, names, other):
    item = wanted(1, start=1) if other == "same kernel" else wanted(1, kernel="other")
    foreign = fill(entry.layer.root, item, templates)[0]
    for name in names:
        os.replace(foreign.directory / name, entry.directory / name)

    assert is_refused(entry)


def test_a_forged_record_cannot_pass_another_kernel_off_as_this_one(tmp_path, templates):
    this, other = wanted(1)[0], wanted(1, kernel="other")[0]
    layer = Layer(tmp_path, writable=True)
    content = artifact_of(other, templates)
    good = put(layer, other.key, record_of(other, content), content)
    forged = put(layer, this.key, record_of(this, content), content)
    loader = Loader(settings_for(tmp_path, tmp_path))
    loader.load([good])

    with pytest.raises(EntryError, match="no symbol __tvm_ffi_stub"):
        loader.load([forged])


@pytest.mark.parametrize("damage", ["rewritten", "truncated", "removed"])
def test_a_loaded_kernel_does_not_notice_what_happens_to_its_file(entry, tmp_path, damage):
    kernel = Loader(settings_for(entry.layer.root, tmp_path)).load([entry])[0]
    path = writable_copy(entry, ARTIFACT)
    if damage == "rewritten":
        with path.open("r+b") as stream:
            stream.write(b"\xcc" * path.stat().st_size)
    elif damage == "truncated":
        os.truncate(path, 0)
    else:
        shutil.rmtree(entry.directory)

    assert kernel.function() == number_of(wanted(1)[0])


def test_a_bad_entry_in_the_writable_root_is_moved_to_quarantine_and_said_once(entry, warnings):
    os.truncate(writable_copy(entry, ARTIFACT), 100)
    lookup = lookup_in(entry.layer)

    assert [lookup.find(entry.key, whole=True) for _ in range(3)] == [None] * 3
    assert not entry.directory.exists()
    assert len(list((entry.layer.root / "quarantine").iterdir())) == 1
    assert len(warnings()) == 1
    assert str(entry.directory) in warnings()[0]


def test_a_bad_entry_in_a_read_only_root_is_passed_over_and_said_once(entry, warnings):
    os.truncate(writable_copy(entry, ARTIFACT), 100)
    lookup = lookup_in(Layer(entry.layer.root, writable=False))

    assert [lookup.find(entry.key, whole=True) for _ in range(3)] == [None] * 3
    assert entry.directory.exists()
    assert len(warnings()) == 1


def test_a_bad_entry_does_not_hide_a_good_one_in_another_layer(entry, read_only):
    lower = read_only("image", wanted(1))
    os.truncate(writable_copy(entry, ARTIFACT), 100)
    first = Layer(entry.layer.root, writable=False)

    assert lookup_in(first, lower).find(entry.key, whole=True).layer == lower


def test_an_entry_republished_while_it_is_set_aside_is_kept(entry):
    """Another process had replaced the bad entry between our look and our rename."""
    lookup = lookup_in(entry.layer)
    problem = EntryError(where="here", found="a bad record", needed="a good one", remedy="None.")
    lookup.reject(entry, problem)

    assert entry.directory.exists()
    assert lookup.find(entry.key, whole=True) is not None


def test_an_entry_that_the_system_cannot_read_stays_where_it_is(entry, monkeypatch):

    def no_descriptors(*_args, **_kwargs):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr("jitspark.cache.folders.os.open", no_descriptors)
        assert lookup_in(entry.layer).find(entry.key) is None
    assert lookup_in(entry.layer).find(entry.key, whole=True) is not None


def test_an_artifact_cut_short_under_a_record_of_its_own_never_crashes_the_process(tmp_path, templates):
    """Its digest is right, as when a disk was full while it was linked: mapping most of these would be a SIGBUS."""
    (item,) = wanted(1)
    whole = artifact_of(item, templates)
    segments_end = max(
        int.from_bytes(whole[at + 8 : at + 16], "little") + int.from_bytes(whole[at + 32 : at + 40], "little")
        for at in range(64, 64 + 56 * int.from_bytes(whole[56:58], "little"), 56)
    )
    loader = Loader(settings_for(tmp_path, tmp_path))
    for length in (*range(1, 200), *range(200, segments_end, 61), segments_end - 1):
        content = whole[:length]
        with pytest.raises(EntryError, match="ELF library"):
            loader.load([Entry(None, item.key, "0" * 64, record_of(item, content), content)])


def test_a_sealed_artifact_that_is_no_whole_library_is_rebuilt(tmp_path, templates, warnings):
    (item,) = wanted(1)
    settings = settings_for(tmp_path / "cache", tmp_path)
    (tmp_path / "cache").mkdir()
    content = artifact_of(item, templates)[:5000]
    put(Layer(tmp_path / "cache", writable=True), item.key, record_of(item, content), content)

    kernels = build_and_load([item], Lookup(settings), Loader(settings), settings, command=stub_command(templates))

    assert kernels[0].function() == number_of(item)
    assert sum("moved to quarantine" in text for text in warnings()) == 1


def test_checking_that_a_library_is_whole_costs_next_to_nothing(templates):
    content = artifact_of(wanted(1)[0], templates)

    def seconds():
        started = time.process_time()
        for _ in range(100):
            check_library(content, "here")
        return (time.process_time() - started) / 100

    assert min(seconds() for _ in range(10)) < 0.00005
