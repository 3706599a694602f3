"""Public threads about locks, hangs and silence, each replayed; docs/scenarios.md has the table."""

from itertools import pairwise

import pytest
from stub_cache import cache_users, compiles, run_users, told, wait_until

from jitspark.building import share
from jitspark.building.compiler_child import COMPILE_LIMIT_SECONDS


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


@pytest.fixture(scope="module")
def long_compile(tmp_path_factory, templates):
    """Reports of a process that compiles for long and of one that waits, and the log of compiles.

    Their seconds are those that they asked to wait, so that a machine that stands still in between changes nothing.
    """
    folder = tmp_path_factory.mktemp("long")
    task = {"root": str(folder / "cache"), "folder": str(folder), "templates": str(templates), "count": 1}
    task |= {"log": str(folder / "log"), "until": str(folder / "until"), "count_waits": True}
    events = [folder / "first", folder / "second"]
    with cache_users([{**task, "events": str(path)} for path in events]) as users:
        for user in users:
            user.go()
        wait_until(lambda: all(len(told(path, "compiling") + told(path, "waiting")) >= 4 for path in events))
        (folder / "until").touch()
        reports = [user.report() for user in users]
    builder, waiter = sorted(reports, key=lambda report: report["hits"])
    return builder, waiter, folder / "log"


def test_locks_that_exclude_nobody_double_the_work_and_change_nothing(task, tmp_path):
    """sglang#31347: flock is local to the node on common NFS mounts. Two lock domains, one shared root."""
    for name in ("node-a", "node-b"):
        (tmp_path / name).mkdir()
    tasks = [{**task, "count": 3, "seconds": 0.1, "folder": str(tmp_path / name)} for name in ("node-a", "node-b")]

    reports = run_users(tasks * 2)

    assert len({tuple(report["sha256"]) for report in reports}) == 1
    assert all(report["unpublished"] == 0 for report in reports)


def test_a_waiter_waits_as_long_as_a_compile_takes(long_compile):
    """flashinfer#993: a lock timeout of 30 s, shorter than a compile. Here nothing gives up before its limit."""
    builder, waiter, log = long_compile

    assert (len(builder["compiled"]), waiter["hits"]) == (1, 1)
    assert len(compiles(log)) == 1
    assert [event[0] for event in waiter["events"]].count("waiting") >= 2
    assert min(share.PATIENCE_SECONDS, COMPILE_LIMIT_SECONDS) > 90.0


def test_something_is_said_at_least_every_five_seconds(long_compile):
    """vllm#46764, vllm#54529: minutes of silence look like a hang. Each event names the key; a waiter's, the holder."""
    builder, waiter, _ = long_compile

    for report in (builder, waiter):
        moments = [0.0, *(event[4] for event in report["events"])]
        assert max(later - sooner for sooner, later in pairwise(moments)) < 5.0
        assert all("stub/" in event[1] for event in report["events"])
    assert all(event[3] for event in waiter["events"] if event[0] == "waiting")


def test_the_next_start_takes_over_at_once_after_a_kill(task, tmp_path):
    """flashinfer#972: stuck loading after an earlier process was killed."""
    with cache_users([{**task, "seconds": 3600.0}]) as (first,):
        first.go()
        wait_until(lambda: compiles(tmp_path / "log"))
        first.kill()

    reports = run_users([{**task, "report_seconds": 0.0}])

    assert len(reports[0]["compiled"]) == 1
    assert "waiting" not in [event[0] for event in reports[0]["events"]]
