"""kill -9 at every step of publishing, setting aside and pruning: readers see all or nothing, the next one repairs."""

import shutil

import pytest
from step_faults import every_step, killed_at
from stub_cache import artifact_of, compiles, fill, record_of, settings_for, stub_command, wanted

from cache_tools.prune import Rules, prune
from jitspark.building.build import build
from jitspark.cache.failures import remember_failure, remembered_failure
from jitspark.cache.lookup import Lookup
from jitspark.cache.staging import staging, sweep
from jitspark.cache.store import ARTIFACT, Layer, put, read_entry, set_aside
from jitspark.errors import EntryError

ITEMS = wanted(3)
ITEM = ITEMS[0]


def state(layer, item=ITEM):
    """What a reader sees: an entry that is whole, nothing, or something bad."""
    content_toolchain = record_of(item, b"x").toolchain_digest
    try:
        entry = read_entry(layer, item.key, content_toolchain, whole=True)
    except EntryError:
        return "bad"
    return "nothing" if entry is None else "whole"


def damaged(layer):
    path = read_entry(layer, ITEM.key, record_of(ITEM, b"x").toolchain_digest).directory / ARTIFACT
    path.chmod(0o644)
    path.write_bytes(b"damage")


def leftovers(layer):
    folder = layer.root / "staging"
    return list(folder.iterdir()) if folder.exists() else []


@pytest.fixture
def layer(memory_path):
    (memory_path / "cache").mkdir()
    return Layer(memory_path / "cache", writable=True)


def emptied(layer):
    shutil.rmtree(layer.root)
    layer.root.mkdir()


@pytest.mark.parametrize("before", ["nothing", "whole", "bad"])
def test_publishing_killed_at_any_step_leaves_all_or_nothing(layer, templates, before):
    content = artifact_of(ITEM, templates)
    record = record_of(ITEM, content)
    seen = set()

    def run(number):
        emptied(layer)
        if before != "nothing":
            fill(layer.root, [ITEM], templates)
        if before == "bad":
            damaged(layer)
        killed = killed_at(lambda: put(layer, ITEM.key, record, content), number)
        seen.add(state(layer))
        put(layer, ITEM.key, record, content)
        assert state(layer) == "whole"
        sweep(layer.root)
        assert not leftovers(layer)
        return killed

    steps = every_step(run)
    assert steps > 15, f"only {steps} steps were seen"
    assert seen == {before, "whole"} if before != "bad" else seen == {"bad", "nothing", "whole"}


def test_setting_aside_killed_at_any_step_leaves_a_bad_entry_or_none(layer, templates):
    toolchain = record_of(ITEM, b"x").toolchain_digest

    def run(number):
        emptied(layer)
        fill(layer.root, [ITEM], templates)
        damaged(layer)
        killed = killed_at(lambda: set_aside(layer, ITEM.key, toolchain), number)
        assert state(layer) in ("bad", "nothing")
        set_aside(layer, ITEM.key, toolchain)
        assert state(layer) == "nothing"
        return killed

    assert every_step(run) > 5


def test_pruning_killed_at_any_step_leaves_each_entry_whole_or_gone(layer, templates, tmp_path):
    settings = settings_for(layer.root, tmp_path)
    seen = set()

    def run(number):
        emptied(layer)
        fill(layer.root, ITEMS, templates)
        killed = killed_at(lambda: prune(layer, Rules(max_size=0), settings), number)
        states = [state(layer, item) for item in ITEMS]
        assert set(states) <= {"whole", "nothing"}
        seen.add(tuple(states))
        prune(layer, Rules(max_size=0), settings)
        assert [state(layer, item) for item in ITEMS] == ["nothing"] * 3
        assert not leftovers(layer)
        fill(layer.root, ITEMS, templates)
        return killed

    steps = every_step(run)
    assert steps > 15
    assert len(seen) >= 4, "a kill between any two of the three removals"


def test_remembering_a_failure_killed_at_any_step_leaves_it_or_nothing(layer):
    from jitspark.errors import CompileError

    error = CompileError(where="a", found="b", needed="c", remedy="d", log="e")

    def run(number):
        emptied(layer)
        killed = killed_at(lambda: remember_failure(layer, ITEM.key, "0" * 64, error), number)
        known = remembered_failure(layer, ITEM.key, "0" * 64)
        assert known is None or str(known) == str(error)
        remember_failure(layer, ITEM.key, "0" * 64, error)
        assert str(remembered_failure(layer, ITEM.key, "0" * 64)) == str(error)
        return killed

    assert every_step(run) > 3


def test_the_next_builder_does_only_what_a_killed_one_left_undone(layer, templates, tmp_path):
    """A whole build, its parent killed at some steps; each time the next one compiles what is missing, once."""
    settings = settings_for(layer.root, tmp_path)
    log = tmp_path / "log"

    def whole_build():
        return len(build(ITEMS, Lookup(settings), settings, command=stub_command(templates, log)).entries)

    for number in (5, 20, 40, 60, 80, 100, 120):
        emptied(layer)
        killed_at(whole_build, number)
        there = [item for item in ITEMS if state(layer, item) == "whole"]
        log.unlink(missing_ok=True)
        assert whole_build() == 3
        assert len(compiles(log)) == len(set(compiles(log))) == 3 - len(there)


def test_work_under_way_is_not_swept(layer):
    with staging(layer.root) as folder:
        assert sweep(layer.root) == []
        assert folder.exists()


def test_another_machines_work_is_swept_by_age_alone(layer, monkeypatch):
    (layer.root / "staging" / f"elsewhere.{'0' * 16}.1.abc").mkdir(parents=True)
    assert sweep(layer.root) == []

    monkeypatch.setattr("jitspark.cache.staging.ORPHAN_SECONDS", -1.0)

    assert len(sweep(layer.root)) == 1
