"""What cleaning takes for left behind, and what it must never touch: others' work, however old, and behind links."""

import os
import time

import pytest
from stub_cache import settings_for, stub_command, wanted

from jitspark.building.build import build
from jitspark.cache.failures import FAILURES, REMEMBERED_SECONDS, sweep_failures
from jitspark.cache.lookup import Lookup
from jitspark.cache.staging import is_orphan, owned_name, sweep, sweep_temporary

LONG_AGO = 40 * 86400.0


@pytest.fixture
def no_patience(monkeypatch):
    """Everything is old enough to go."""
    monkeypatch.setattr("jitspark.cache.staging.ORPHAN_SECONDS", -1.0)
    monkeypatch.setattr("jitspark.cache.staging.QUARANTINE_SECONDS", -1.0)


def dead_owner():
    """A name as a process gave it that has ended since."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return owned_name().replace(f".{os.getpid()}.", f".{pid}.")


@pytest.mark.usefixtures("no_patience")
def test_in_a_temporary_directory_only_what_a_build_made_is_swept(tmp_path):
    """The cache of last resort, the locks and anybody's checkout may lie there too, under the same prefix."""
    others = [f"jitspark-{os.geteuid()}", "jitspark-checkout", "jitspark-1000.old"]
    left = f"jitspark-{dead_owner()}"
    for name in (*others, left):
        (tmp_path / name / "something").mkdir(parents=True)

    sweep_temporary(tmp_path, "jitspark-")

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


def test_work_of_a_living_process_is_no_orphan_however_the_clock_jumps():
    assert not is_orphan(owned_name(), LONG_AGO)
    assert is_orphan(dead_owner(), 0.0)
    assert is_orphan(f"elsewhere.{'0' * 16}.1.abc", LONG_AGO)


@pytest.mark.usefixtures("no_patience")
@pytest.mark.parametrize("name", ["staging", "quarantine", FAILURES])
def test_nothing_behind_a_link_is_swept(tmp_path, name):
    (tmp_path / "cache").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis").write_text("precious")
    os.utime(tmp_path / "work" / "thesis", (0, 0))
    (tmp_path / "cache" / name).symlink_to(tmp_path / "work")

    assert sweep(tmp_path / "cache") == sweep_failures(tmp_path / "cache") == []
    assert (tmp_path / "work" / "thesis").exists()


def test_what_cannot_be_removed_does_not_keep_other_failures_from_going(tmp_path):
    old = time.time() - REMEMBERED_SECONDS - 10.0
    (tmp_path / FAILURES / "a folder").mkdir(parents=True)
    for name in ("0.json", "z.json"):
        (tmp_path / FAILURES / name).write_text("{}")
    for path in (tmp_path / FAILURES).iterdir():
        os.utime(path, (old, old))

    swept = sweep_failures(tmp_path)

    assert [path.name for path in swept] == ["0.json", "z.json"]
    assert [path.name for path in (tmp_path / FAILURES).iterdir()] == ["a folder"]


def test_a_build_sweeps_what_a_killed_one_left_below_the_root(tmp_path, templates):
    left = tmp_path / "cache" / "staging" / dead_owner()
    left.mkdir(parents=True)
    settings = settings_for(tmp_path / "cache", tmp_path)

    assert len(build(wanted(1), Lookup(settings), settings, command=stub_command(templates)).compiled) == 1
    assert not left.exists()
