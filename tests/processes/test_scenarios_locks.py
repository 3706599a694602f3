"""Public threads about locks, hangs and silence, each replayed; docs/scenarios.md has the table."""

import time
from itertools import pairwise

import pytest
from stub_cache import CacheUser, cache_users, compiles, run_users, wait_until

from jitspark.building import share
from jitspark.building.compiler_child import COMPILE_LIMIT_SECONDS

# Longer than two reports at their usual pace, much shorter than the compiles in the threads.
LONG = 6.0


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
    """Reports of a process that compiles for long and of one that waits, and the log of compiles."""
    folder = tmp_path_factory.mktemp("long")
    task = {"root": str(folder / "cache"), "folder": str(folder), "templates": str(templates), "count": 1}
    task |= {"log": str(folder / "log"), "seconds": LONG}
    reports, _ = run_users([task] * 2)
    builder, waiter = sorted(reports, key=lambda report: report["hits"])
    return builder, waiter, folder / "log"


def test_locks_that_exclude_nobody_double_the_work_and_change_nothing(task, tmp_path):
    """sglang#31347: flock is local to the node on common NFS mounts. Two lock domains, one shared root."""
    for name in ("node-a", "node-b"):
        (tmp_path / name).mkdir()
    tasks = [{**task, "count": 3, "seconds": 0.1, "folder": str(tmp_path / name)} for name in ("node-a", "node-b")]

    reports, _ = run_users(tasks * 2)

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
    with cache_users([{**task, "seconds": 60.0}]) as (first,):
        first.go()
        wait_until(lambda: compiles(tmp_path / "log"))
        first.kill()
    second = CacheUser(**task)
    second.wait_ready()
    second.go()
    killed = time.monotonic()
    wait_until(lambda: len(compiles(tmp_path / "log")) == 2)
    took = time.monotonic() - killed

    assert len(second.report()["compiled"]) == 1
    assert took < 1.0
