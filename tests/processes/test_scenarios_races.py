"""Public threads about races between ranks and partial files, each replayed; docs/scenarios.md has the table."""

import os
import shutil
from dataclasses import replace

import pytest
from stub_cache import artifact_of, compiles, fill, lookup_in, record_of, run_users, wait_until, wanted

from jitspark.cache import store
from jitspark.cache.folders import make_root
from jitspark.cache.staging import staging
from jitspark.cache.store import ARTIFACT, RECORD, Layer, entry_directory, keys_in, put, read_entry
from jitspark.errors import CacheDirectoryError
from jitspark.key import recipe_of
from jitspark.registry import kernel_names, load_spec
from jitspark.target import target_of_capability

ITEM = wanted(1)[0]


@pytest.fixture
def task(tmp_path, templates):
    log = str(tmp_path / "log")
    return {
        "root": str(tmp_path / "cache"),
        "folder": str(tmp_path),
        "templates": str(templates),
        "log": log,
        "count": 1,
    }


@pytest.fixture
def layer(tmp_path):
    (tmp_path / "cache").mkdir()
    return Layer(tmp_path / "cache", writable=True)


def digests(reports):
    return {tuple(report["sha256"]) for report in reports}


def test_cold_processes_publish_one_validated_artifact(task, tmp_path):
    """flashinfer#4062: eight processes, an empty cache, one key."""
    reports = run_users([{**task, "seconds": 0.1}] * 8)

    assert len(compiles(tmp_path / "log")) == 1
    assert len(digests(reports)) == 1


def test_a_compiler_that_fails_after_an_empty_file_leaves_no_entry_and_reaches_all_waiters(task, tmp_path):
    """flashinfer#4136: the compiler's exit status was ignored."""
    reports = run_users([{**task, "answer": "exit", "seconds": 0.2, "load": False}] * 4)

    assert [len(report["failed"]) for report in reports] == [1] * 4
    assert list(keys_in(Layer(tmp_path / "cache", writable=True))) == []


def forked(action):
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return pid


def all_succeed(pids):
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * len(pids)


def test_thirty_two_processes_make_the_same_folders(tmp_path, templates):
    """flashinfer#539: "File exists" when ranks make the same directories."""
    items = wanted(32)
    content = {item.key: artifact_of(item, templates) for item in items}
    records = {item.key: record_of(item, content[item.key]) for item in items}
    root = tmp_path / "deep" / "down" / "cache"

    def publish(item):
        make_root(root)
        put(Layer(root, writable=True), item.key, records[item.key], content[item.key])

    assert all_succeed([forked(lambda item=item: publish(item)) for item in items])
    assert len(list(keys_in(Layer(root, writable=True)))) == 32


def test_two_toolchains_share_one_root_and_each_loads_its_own(task):
    """flashinfer#5232: an object could land under another build's metadata."""
    tasks = [{**task, "count": 6, "seconds": 0.02, "accept": "own", "toolchain": name} for name in ("a", "b")] * 2

    reports = run_users(tasks)

    assert all(all(report["own"]) and len(report["own"]) == 6 for report in reports)


def test_a_folder_where_an_artifact_belongs_ends_with_every_process_loaded(task, tmp_path):
    """vllm#24601: several engines clobber cache entries that are directories."""
    toolchain = record_of(ITEM, b"x").toolchain_digest
    (entry_directory(tmp_path / "cache", ITEM.key, toolchain) / ARTIFACT / "inner").mkdir(parents=True)

    reports = run_users([task] * 6)

    assert len(digests(reports)) == 1
    assert {len(report["sha256"]) for report in reports} == {1}


def test_an_entry_is_one_file_and_one_record_and_appears_whole(layer, templates, monkeypatch):
    """vllm#27616: an artifact in a single file, published last."""
    seen = []
    rename = os.rename

    def watched(source, target, **folders):
        seen.append(sorted(os.listdir(source)))
        rename(source, target, **folders)

    monkeypatch.setattr("jitspark.cache.store.os.rename", watched)
    entry = fill(layer.root, [ITEM], templates)[0]

    assert seen == [[ARTIFACT, RECORD]]
    assert sorted(os.listdir(entry.directory)) == [ARTIFACT, RECORD]


@pytest.mark.parametrize("kernel", kernel_names())
def test_a_key_knows_the_architecture_and_never_the_device(kernel):
    """vllm#38962: a cache path without the device's index. Here two devices of one architecture share every key."""
    spec = load_spec(kernel)
    specialization = spec.specialize_case(spec.cases[0])
    first, second = (recipe_of(specialization, target_of_capability(9, 0)) for _device in range(2))
    other = recipe_of(specialization, target_of_capability(10, 0))

    assert first.key == second.key != other.key
    assert replace(other, target=first.target, options=first.options) == first


def test_two_hosts_without_a_common_lock_agree(task, tmp_path):
    """DeepGEMM#301, DeepGEMM#302: no synchronisation across processes; here not across two lock domains."""
    for name in ("host-a", "host-b"):
        (tmp_path / name).mkdir()
    tasks = [{**task, "count": 4, "seconds": 0.05, "folder": str(tmp_path / name)} for name in ("host-a", "host-b")] * 4

    reports = run_users(tasks)

    assert len(digests(reports)) == 1
    assert 4 <= len(compiles(tmp_path / "log")) <= 8


def test_a_staging_folder_that_vanishes_is_made_again(layer, templates, monkeypatch):
    """triton#2688, triton#4002, triton#4295: FileNotFoundError around temporary file and replace."""
    publish, calls = store.publish, []

    def vanishing(root, key, record, staged, **options):
        calls.append(staged)
        if len(calls) == 1:
            shutil.rmtree(layer.root / "staging")
        return publish(root, key, record, staged, **options)

    monkeypatch.setattr("jitspark.cache.store.publish", vanishing)
    content = artifact_of(ITEM, templates)

    assert put(layer, ITEM.key, record_of(ITEM, content), content).read_artifact() == content
    assert len(calls) == 2


def test_a_busy_folder_that_cannot_be_removed_does_not_stop_publishing(layer, templates, monkeypatch):
    """triton#11512: EBUSY from removing directories on a shared file system."""

    def busy(*_args, **_kwargs):
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("os.rmdir", busy)
    content = artifact_of(ITEM, templates)
    with staging(layer.root) as folder:
        (folder / "something").write_text("left")

    assert put(layer, ITEM.key, record_of(ITEM, content), content).read_artifact() == content


def test_an_entry_that_is_gone_on_reading_it_back_is_a_miss(layer, templates):
    """triton#11512: ENOENT on reading back what was just written."""
    entry = fill(layer.root, [ITEM], templates)[0]
    shutil.rmtree(entry.directory)

    assert lookup_in(layer).find(ITEM.key, whole=True) is None
    assert fill(layer.root, [ITEM], templates)[0].read_artifact()


def test_record_and_artifact_always_come_from_one_compile(layer, templates):
    """pytorch#92664: the binary of rank A with the metadata of rank B, from a compiler that is not reproducible."""
    contents = [artifact_of(ITEM, templates) + bytes([rank]) for rank in range(4)]
    records = [record_of(ITEM, content) for content in contents]

    enough = layer.root / "enough"

    def publish(rank):
        while not enough.exists():
            entry = put(layer, ITEM.key, records[rank], contents[rank])
            store.set_aside(layer, ITEM.key, entry.toolchain)

    def read():
        return read_entry(layer, ITEM.key, records[0].toolchain_digest, whole=True)  # raises where they do not match

    pids = [forked(lambda rank=rank: publish(rank)) for rank in range(4)]
    try:
        seen = {wait_until(read).record.sha256 for _ in range(100)}
    finally:
        enough.touch()
    assert all_succeed(pids)
    assert seen <= {record.sha256 for record in records}


def test_folders_that_exist_already_are_no_error(layer, templates):
    """sglang#27604: a concurrent temporary directory's EEXIST was fatal."""
    for name in ("staging", "quarantine", "failures", "artifacts-v1"):
        (layer.root / name).mkdir()

    assert fill(layer.root, [ITEM], templates)[0].read_artifact()


def test_eight_ranks_that_want_overlapping_keys_compile_each_once(task, tmp_path):
    """sglang#36231: local ranks repeat each other's precompiles."""
    tasks = [{**task, "start": rank, "count": 8, "seconds": 0.03} for rank in range(8)]

    reports = run_users(tasks)

    assert len(compiles(tmp_path / "log")) == len(set(compiles(tmp_path / "log"))) == 15
    assert [len(report["sha256"]) for report in reports] == [8] * 8


def test_a_shared_root_holds_everything_once(task, tmp_path):
    """TensorRT-LLM#17233, TensorRT-LLM#9983, TensorRT-LLM#18897: a workspace per rank, to dodge races."""
    run_users([{**task, "count": 5, "seconds": 0.02}] * 8)

    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == sorted([ARTIFACT, RECORD] * 5)


def test_a_bad_entry_that_cannot_be_moved_is_one_clear_error(layer, templates, monkeypatch):
    """flashinfer#4062 again: what was published is validated, and a bad entry in the way is never taken for ours."""
    entry = fill(layer.root, [ITEM], templates)[0]
    (entry.directory / ARTIFACT).chmod(0o644)
    (entry.directory / ARTIFACT).write_bytes(b"damage")
    monkeypatch.setattr("jitspark.cache.store.set_aside", lambda *_: "stuck")

    with pytest.raises(CacheDirectoryError, match="cannot be moved"):
        fill(layer.root, [ITEM], templates)
