"""Packs in other forms, merged, compared, compiled again, and asked what they need of a machine."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace

import pytest
import stub_cache
from pack_fixtures import everything_below, filled, make_keys, modes_below

from cache_tools import machine
from cache_tools.cache_difference import cache_difference, difference_json, difference_lines
from cache_tools.contents import Runtime
from cache_tools.manifest import Needs
from cache_tools.merge import merge
from cache_tools.pack import Form, pack
from cache_tools.quantities import parse_share
from cache_tools.signing import ANY, Trust, trust_in
from cache_tools.sources import Source, read_source
from cache_tools.unpack import unpack
from cache_tools.verify_source import source_lines, verify_source
from jitspark.building import rebuild as rebuild_module
from jitspark.building.rebuild import rebuild, sample
from jitspark.cache.lookup import Lookup
from jitspark.cache.store import Layer
from jitspark.errors import CacheDirectoryError, PackError, TargetError, UsageError
from jitspark.installed_caches import installed_caches
from jitspark.settings import Settings, from_environment
from jitspark.spec import CONST, KernelSpec
from jitspark.target import TARGETS

NAME = "tiny_sm_90a_tp1"
RUNTIME = Runtime("cu13", b"\x7fELF" + bytes(5000), b"a licence")
NEEDS = Needs(("x86_64-linux", "aarch64-linux"), ("sm_90a",), ("cu13",), ("a", "b"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
def entries(tmp_path_factory, templates):
    return filled(tmp_path_factory.mktemp("cache") / "root", templates, 2, 1)


@pytest.fixture
def settings(tmp_path):
    return Settings(cache_dir=tmp_path / "cache", lock_dir=tmp_path / "locks")


def found_in(root, entries):
    lookup = stub_cache.lookup_in(Layer(root, writable=False))
    return [lookup.find(entry.key, whole=True) for entry in entries]


def test_a_directory_is_a_read_only_layer_of_fixed_modes_and_times(tmp_path, entries, keys):
    before = os.umask(0o077)
    try:
        pack(tmp_path / "layer", entries, RUNTIME, Form("dir", sign=keys[0]))
    finally:
        os.umask(before)

    assert all(found_in(tmp_path / "layer", entries))
    assert modes_below(tmp_path / "layer") == {(True, "0o755"), (False, "0o444")}
    assert {path.stat().st_mtime for path in (tmp_path / "layer").rglob("*")} == {0}
    assert (tmp_path / "layer/runtime-v1/cu13/LICENSE").read_bytes() == RUNTIME.licence
    assert len(list((tmp_path / "layer/packs-v1").iterdir())) == 2


@pytest.mark.parametrize("form", ["dir", "oci"])
def test_something_in_the_way_of_a_directory_is_one_error_and_stays(tmp_path, entries, form):
    (tmp_path / "there").mkdir()
    (tmp_path / "there/file").write_text("mine")

    with pytest.raises(PackError, match="something there already"):
        pack(tmp_path / "there", entries, form=Form(form))
    assert everything_below(tmp_path) == {"there/file": b"mine"}


@pytest.mark.parametrize("form", ["tar.zst", "dir", "oci", "wheel"])
def test_equal_entries_give_equal_bytes_in_every_form(tmp_path, entries, form):
    made = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        path = tmp_path / name if form == "wheel" else tmp_path / name / "x"
        packed = pack(path, entries if name == "one" else reversed(entries), RUNTIME, Form(form, NAME))
        made.append((everything_below(tmp_path / name), packed.sha256, packed.size))

    assert made[0] == made[1]


def test_an_unknown_format_is_one_error(tmp_path, entries):
    with pytest.raises(UsageError, match="--format"):
        pack(tmp_path / "x", entries, form=Form("zip"))


def test_an_image_layout_is_whole(tmp_path, entries, keys):
    packed = pack(tmp_path / "image", entries, form=Form("oci", sign=keys[0]))
    index = json.loads((tmp_path / "image/index.json").read_text())
    manifest = blob(tmp_path / "image", index["manifests"][0])
    config = blob(tmp_path / "image", manifest["config"])
    layer = tmp_path / "image/blobs" / manifest["layers"][0]["digest"].replace(":", "/")

    assert manifest["annotations"]["jitspark.merkle-root"] == packed.merkle_root
    assert config["os"] == "linux"
    assert config["architecture"] in ("amd64", "arm64")
    assert (layer.stat().st_size, stub_cache.sha256(layer.read_bytes())) == (packed.size, packed.sha256)
    with tarfile.open(layer) as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path / "root", filter="data")
    assert {(m.uid, m.gid, m.mtime, m.mode) for m in members} == {(0, 0, 0, 0o755), (0, 0, 0, 0o444)}
    assert all(found_in(tmp_path / "root", entries))


@pytest.mark.parametrize(
    "read", [read_source, lambda path, trust, settings: verify_source(path, trust, None, settings)]
)
def test_a_directory_that_is_no_cache_is_not_one_without_entries(tmp_path, entries, keys, settings, read):
    pack(tmp_path / "image", entries, form=Form("oci", sign=keys[0]))
    trust = trust_in([keys[1]], allow_unsigned=False)

    with pytest.raises(CacheDirectoryError, match=r"no artifacts-v1 among them; .* where it is unpacked"):
        read(tmp_path / "image", trust, settings)
    (tmp_path / "empty").mkdir()
    assert not read(tmp_path / "empty", trust, settings).entries


def test_of_nothing_verify_does_not_say_that_it_is_signed(tmp_path, keys, settings):
    (tmp_path / "empty").mkdir()
    result = verify_source(tmp_path / "empty", trust_in([keys[1]], allow_unsigned=False), None, settings)

    assert list(source_lines(result))[-1] == "nothing is here that could be signed"


def blob(folder, descriptor):
    content = (folder / "blobs" / descriptor["digest"].replace(":", "/")).read_bytes()
    assert len(content) == descriptor["size"]
    assert stub_cache.sha256(content) == descriptor["digest"].partition(":")[2]
    return json.loads(content)


def test_a_wheel_is_named_after_what_it_holds_and_records_every_file(tmp_path, entries):
    packed = pack(tmp_path, entries, form=Form("wheel", "muse_spark_open_sm_90a_tp8"))

    assert packed.path.name.startswith("jitspark_cache_muse_spark_open_sm_90a_tp8-0.1.0+")
    assert packed.path.name.endswith(f"-py3-none-linux_{os.uname().machine}.whl")
    with zipfile.ZipFile(packed.path) as archive:
        record = next(name for name in archive.namelist() if name.endswith("/RECORD"))
        listed = [line.split(",") for line in archive.read(record).decode().splitlines()]
        assert [line[0] for line in listed] == archive.namelist()
        assert all(len(archive.read(name)) == int(size) for name, _, size in listed[:-1])


@pytest.mark.parametrize("name", ["", "Upper", "a-b", "../evil", "x" * 101, "a__b"])
def test_a_wheel_of_no_good_name_is_refused(tmp_path, entries, name):
    with pytest.raises(UsageError, match="--name"):
        pack(tmp_path, entries, form=Form("wheel", name))
    assert not list(tmp_path.iterdir())


def test_a_wheel_where_it_is_installed_is_a_layer(tmp_path, entries, monkeypatch):
    wheel = pack(tmp_path, entries, RUNTIME, form=Form("wheel", NAME)).path
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    settings = from_environment({"JITSPARK_CACHE_DIR": "", "JITSPARK_CACHE_PATH": "/nowhere"})

    assert [str(root) for root in settings.cache_path] == [
        "/nowhere",
        f"{tmp_path}/site/jitspark_cache/tiny_sm_90a_tp1",
    ]
    assert all(Lookup(settings).find(entry.key, whole=True) for entry in entries)


def test_installed_caches_are_found_in_order_and_relative_places_count_for_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("two/jitspark_cache/b", "two/jitspark_cache/a", "one/jitspark_cache/c", "jitspark_cache/here"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "one/jitspark_cache/file").write_text("no root")
    places = ["", ".", f"{tmp_path}/one", f"{tmp_path}/none", f"{tmp_path}/two", f"{tmp_path}/one"]

    assert [path.name for path in installed_caches(places)] == ["c", "a", "b"]


def test_looking_for_installed_caches_costs_a_lookup_nothing_to_speak_of():
    code = "import timeit; from jitspark.installed_caches import installed_caches as f; "
    code += "print(min(timeit.repeat(f, number=100)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert float(done.stdout) / 100 < 500e-6


def test_a_merge_is_the_pack_of_the_union(tmp_path, templates, settings, keys):
    whole = filled(tmp_path / "root", templates, 4, 2)
    pack(tmp_path / "a.tar.zst", whole[:4], RUNTIME)
    pack(tmp_path / "b.tar.zst", whole[2:])
    pack(tmp_path / "union.tar.zst", whole, RUNTIME, Form(sign=keys[0]))
    sources = [tmp_path / "b.tar.zst", tmp_path / "a.tar.zst", tmp_path / "root"]
    merge(tmp_path / "merged.tar.zst", sources, ANY, Form(sign=keys[0]), settings)

    assert (tmp_path / "merged.tar.zst").read_bytes() == (tmp_path / "union.tar.zst").read_bytes()


def test_a_merge_trusts_no_more_than_unpacking(tmp_path, entries, settings, keys):
    pack(tmp_path / "a.tar.zst", entries)
    for trust in (Trust(), trust_in([keys[1]], allow_unsigned=True)):
        with pytest.raises(PackError, match="nobody signed"):
            merge(tmp_path / "merged.tar.zst", [tmp_path / "a.tar.zst"], trust, Form(), settings)
    assert not (tmp_path / "merged.tar.zst").exists()


def other_bytes(item, templates, root):
    content = stub_cache.artifact_of(item, templates) + b"other"
    record = stub_cache.record_of(item, content, stub_cache.other_toolchain())
    root.mkdir()
    return stub_cache.put(Layer(root, writable=True), item.key, record, content)


def test_a_merge_of_different_bytes_for_one_key_is_refused_by_its_name(tmp_path, templates, entries, settings):
    forged = other_bytes(stub_cache.wanted(1)[0], templates, tmp_path / "other")
    pack(tmp_path / "a.tar.zst", entries)
    pack(tmp_path / "b.tar.zst", [forged])

    with pytest.raises(PackError, match=forged.key.recipe):
        merge(tmp_path / "m.tar.zst", [tmp_path / "a.tar.zst", tmp_path / "b.tar.zst"], ANY, Form(), settings)


def test_a_merge_of_different_runtime_libraries_is_refused(tmp_path, entries, settings):
    pack(tmp_path / "a.tar.zst", entries, RUNTIME)
    pack(tmp_path / "b.tar.zst", entries, replace(RUNTIME, library=b"another"))

    with pytest.raises(PackError, match="another runtime library"):
        merge(tmp_path / "m.tar.zst", [tmp_path / "a.tar.zst", tmp_path / "b.tar.zst"], ANY, Form(), settings)


def source(entries):
    return Source(None, tuple(entries), (), None)


def test_a_difference_tells_what_is_on_one_side_and_in_which_fields(tmp_path, templates, settings):
    first = filled(tmp_path / "a", templates, 3)
    second = stub_cache.fill(tmp_path / "b", stub_cache.wanted(3, start=1), templates, stub_cache.other_toolchain())
    pack(tmp_path / "b.tar.zst", second)
    packed = read_source(tmp_path / "b.tar.zst", ANY, settings)
    found = cache_difference(source(first), packed)

    assert [(each.side, each.key) for each in found.only] == [("A", first[0].key), ("B", second[2].key)]
    assert {d.field for each in found.only for d in each.differences} == {"axes.n"}
    assert (found.same, found.equal) == (2, False)
    assert list(difference_lines(found, "a", "b"))[-1].startswith("2 entries the same, 0 with other bytes, 2 on one")
    same = {"only": [], "changed": [], "plans": [], "same": 3, "equal": True}
    assert difference_json(cache_difference(source(second), packed)) == same


def test_a_difference_tells_other_bytes(tmp_path, templates, entries):
    forged = other_bytes(stub_cache.wanted(1)[0], templates, tmp_path / "other")

    assert cache_difference(source(entries), source([forged])).changed == ((forged.key, forged.toolchain),)


def stub_spec(name):
    return KernelSpec(name, {"n": CONST}, {}, {}, (), (), TARGETS, kernel=f"kernel:{name}", reference="reference:x")


@pytest.fixture
def rebuilt(tmp_path, templates, monkeypatch, settings):
    """A function that compiles entries again, with a stub for compiler and sources."""
    recipes = {(i.recipe.kernel, i.recipe.axes["n"]): i.recipe for i in stub_cache.wanted(20)}
    monkeypatch.setattr(rebuild_module, "load_spec", stub_spec)
    monkeypatch.setattr(rebuild_module, "recipe_of", lambda s, _: recipes[s.name, s.axes["n"]])
    command = stub_cache.stub_command(templates, tmp_path / "log")
    return lambda entries: rebuild(entries, settings, command)


def test_entries_compiled_again_give_the_same_bytes_and_change_no_cache(tmp_path, templates, rebuilt):
    entries = stub_cache.fill(tmp_path / "cache", stub_cache.wanted(4), templates)
    before = everything_below(tmp_path / "cache")
    result = rebuilt(entries)

    assert (len(result.same), result.different, result.skipped) == (4, (), ())
    assert len(stub_cache.compiles(tmp_path / "log")) == 4
    assert everything_below(tmp_path / "cache") == before


def test_an_entry_of_other_bytes_is_found_and_others_are_told_apart(tmp_path, templates, rebuilt):
    good, foreign = stub_cache.wanted(2)
    content = stub_cache.artifact_of(good, templates) + b"evil"
    (tmp_path / "cache").mkdir()
    layer = Layer(tmp_path / "cache", writable=True)
    forged = stub_cache.put(layer, good.key, stub_cache.record_of(good, content), content)
    (other,) = stub_cache.fill(tmp_path / "cache", [foreign], templates, stub_cache.other_toolchain())
    result = rebuilt([forged, other])

    assert [(entry, "sha256" in why) for entry, why in result.different] == [(forged, True)]
    assert result.skipped == ((other, "built by another toolchain"),)


def test_a_sample_is_spread_and_the_same_each_time(entries):
    assert len(sample(entries, 0.1)) == 1
    assert sample(entries, 0.5) == sample(list(reversed(entries)), 0.5)
    assert len(sample(entries, 1.0)) == 3
    assert not sample([], 0.5)


@pytest.mark.parametrize(("text", "share"), [("10%", 0.1), ("0.5%", 0.005), ("100%", 1.0)])
def test_a_share_is_read(text, share):
    assert parse_share(text, "--rebuild") == pytest.approx(share)


@pytest.mark.parametrize("text", ["10", "0%", "101%", "%", "ten%", "-1%"])
def test_what_is_no_share_is_refused(text):
    with pytest.raises(UsageError, match="--rebuild"):
        parse_share(text, "--rebuild")


@pytest.mark.parametrize(
    ("host", "gpus", "error"),
    [
        ("x86_64-linux", None, None),
        ("x86_64-linux", ("sm_90a",), None),
        ("x86_64-linux", ("sm_100a",), TargetError),
        ("x86_64-linux", (), TargetError),
        ("riscv64-linux", None, PackError),
    ],
)
def test_a_pack_for_another_host_or_other_gpus_is_refused_and_leaves_nothing(
    tmp_path, entries, monkeypatch, host, gpus, error
):
    monkeypatch.setattr(machine, "host_name", lambda: host)
    monkeypatch.setattr(machine, "gpu_targets", lambda: gpus)
    pack(tmp_path / "x.tar.zst", entries)
    (tmp_path / "root").mkdir()
    layer = Layer(tmp_path / "root", writable=True)

    def accept(needs):
        machine.refuse_elsewhere(replace(needs, hosts=NEEDS.hosts), "x.tar.zst")

    if error is None:
        assert unpack(tmp_path / "x.tar.zst", layer, ANY, accept).new == 3
    else:
        with pytest.raises(error):
            unpack(tmp_path / "x.tar.zst", layer, ANY, accept)
        assert not everything_below(layer.root)


def test_each_need_says_whether_this_machine_has_it(monkeypatch, settings):
    monkeypatch.setattr(machine, "host_name", lambda: "riscv64-linux")
    monkeypatch.setattr(machine, "gpu_targets", lambda: ("sm_90a",))
    monkeypatch.setattr(machine, "find_spec", lambda _: None)
    found = list(machine.needs_here(replace(NEEDS, runtimes=("cu12",)), settings))

    assert [(need.what, need.here) for need in found] == [
        ("host", False),
        ("target", True),
        ("runtime library", False),
        ("runtime ABI", False),
    ]
