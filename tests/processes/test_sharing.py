"""Ranks share the work: each key is compiled once per node, and nobody waits where nothing is under way."""

import json
import os
import signal
import time

import pytest
from stub_cache import (
    CacheUser,
    artifact_of,
    cache_users,
    compiles,
    fill,
    record_of,
    run_users,
    settings_for,
    stub_command,
    told,
    wait_until,
    wanted,
)

from jitspark.building import share
from jitspark.building.build import build
from jitspark.cache.lock import Lock, keys_folder
from jitspark.cache.lookup import Lookup
from jitspark.cache.store import Layer, put

COUNT, SLOTS = 40, 2
ENDLESS = 3600.0  # seconds of a compile that a test ends


@pytest.fixture
def task(tmp_path, templates):
    """What every process is told: one root, one lock directory, one log of compiles."""
    (tmp_path / "log").touch()
    return {
        "root": str(tmp_path / "cache"),
        "folder": str(tmp_path),
        "templates": str(templates),
        "log": str(tmp_path / "log"),
        "count": 1,
        "slots": SLOTS,
    }


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def most_at_once(log):
    """How many compiles ran at one moment at most."""
    lines = [line.split(" ", 3) for line in log.read_text().splitlines()]
    running = most = 0
    for kind, *_ in sorted(lines, key=lambda line: float(line[2])):
        running += 1 if kind == "start" else -1
        most = max(most, running)
    return most


def test_sixteen_cold_processes_compile_each_of_forty_keys_once(task, log):
    task |= {"count": COUNT, "seconds": 0.1}

    reports = run_users([task] * 16)

    assert len(compiles(log)) == len(set(compiles(log))) == COUNT
    assert sum(len(report["compiled"]) for report in reports) == COUNT
    assert len({tuple(report["sha256"]) for report in reports}) == 1
    assert most_at_once(log) <= SLOTS


def test_every_slot_is_used_as_long_as_there_is_work(task, log):
    """The first compile ends only when the second has begun, in the other slot."""
    reports = run_users([{**task, "count": 4, "starts": SLOTS}] * 3)

    assert most_at_once(log) == SLOTS
    assert sum(len(report["compiled"]) for report in reports) == 4


def test_with_locks_that_do_nothing_all_results_are_the_same(task, log):
    """No compile ends before more have begun than there are keys: so some key is compiled twice, at one time."""
    task |= {"count": 10, "starts": 11, "no_locks": True}

    reports = run_users([task] * 8)

    assert len(compiles(log)) > 10, "the locks did something after all"
    assert len({tuple(report["sha256"]) for report in reports}) == 1
    assert {len(report["sha256"]) for report in reports} == {10}


def test_a_warm_cache_starts_no_compiler_and_takes_no_lock(task, log, tmp_path, templates):
    fill(tmp_path / "cache", wanted(5), templates)
    task |= {"count": 5}

    reports = run_users([task] * 4)

    assert compiles(log) == []
    assert [report["hits"] for report in reports] == [5] * 4
    assert not (tmp_path / "locks").exists()


def test_nobody_waits_for_a_key_whose_entry_exists(task, tmp_path, templates):
    """The key's lock and every slot are held; measured on a peer: 71 s of stall in this case."""
    fill(tmp_path / "cache", wanted(3), templates)
    held = hold_all_locks(tmp_path, wanted(3))

    reports = run_users([{**task, "count": 3}])

    assert (reports[0]["hits"], reports[0]["waited"]) == (3, 0)
    assert {event[0] for event in reports[0]["events"]} == {"hit"}
    for lock in held:
        lock.release()


def hold_all_locks(tmp_path, items):
    folder = tmp_path / "locks"
    keys = keys_folder(folder, tmp_path / "cache")
    for path in (folder, folder / "slots", keys):
        path.mkdir(mode=0o700, exist_ok=True)
    paths = [keys / f"{item.key.recipe}.lock" for item in items]
    paths += [folder / "slots" / f"{number}.lock" for number in range(SLOTS)]
    locks = [Lock(path) for path in paths]
    assert all(lock.try_acquire("holding everything") for lock in locks)
    return locks


def test_waiters_name_holder_key_and_time_and_take_over_when_it_dies(task, log, tmp_path):
    """Long before they would run out of patience."""
    task |= {"report_seconds": 0.2}
    events = tmp_path / "events"
    with cache_users([{**task, "seconds": ENDLESS}, {**task, "events": str(events)}]) as (holder, waiter):
        holder.go()
        wait_until(lambda: compiles(log))
        waiter.go()
        wait_until(lambda: len(told(events, "waiting")) >= 3)
        holder.process.kill()
        wait_until(lambda: len(compiles(log)) == 2)
        report = waiter.report()

    waiting = [event for event in report["events"] if event[0] == "waiting"]
    assert all(event[3] == [holder.process.pid, "stub(n=0)"] for event in waiting)
    assert waiting[-1][2] > waiting[0][2]
    assert len(report["compiled"]) == 1


def test_a_compile_of_our_own_is_reported_while_it_lasts(task, tmp_path):
    events, until = tmp_path / "events", tmp_path / "until"
    with cache_users([{**task, "report_seconds": 0.2, "events": str(events), "until": str(until)}]) as (user,):
        user.go()
        wait_until(lambda: len(told(events, "compiling")) >= 3)
        until.touch()
        report = user.report()

    compiling = [event[2] for event in report["events"] if event[0] == "compiling"]
    assert len(report["compiled"]) == 1
    assert compiling == sorted(compiling)


def test_the_default_report_comes_more_often_than_every_five_seconds():
    assert share.REPORT_SECONDS + 0.5 < 5.0


def test_a_holder_that_is_stopped_is_not_waited_for_forever(task, log):
    task |= {"seconds": ENDLESS, "patience_seconds": 1.0}
    with cache_users([task, {**task, "seconds": 0.05}]) as (holder, waiter):
        holder.go()
        wait_until(lambda: compiles(log))
        holder.process.send_signal(signal.SIGSTOP)
        waiter.go()
        report = waiter.report()

    assert len(report["compiled"]) == 1


def children_of(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as stream:
        return [int(each) for each in stream.read().split()]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_children_die_with_their_parent(task, log):
    with cache_users([{**task, "seconds": ENDLESS}]) as (user,):
        user.go()
        wait_until(lambda: compiles(log))
        children = children_of(user.process.pid)
        user.process.kill()

        assert children
        wait_until(lambda: not any(is_alive(pid) for pid in children))


def test_a_killed_child_is_replaced_and_its_key_compiled_again(task, log, tmp_path):
    with cache_users([{**task, "until": str(tmp_path / "until")}]) as (user,):
        user.go()
        wait_until(lambda: compiles(log))
        for pid in children_of(user.process.pid):
            os.kill(pid, signal.SIGKILL)
        (tmp_path / "until").touch()
        report = user.report()

    assert len(report["compiled"]) == 1
    assert len(compiles(log)) == 2


def test_what_a_killed_process_left_in_the_temporary_directory_goes_with_the_next_build(task, log, tmp_path):
    (tmp_path / "tmp").mkdir()
    task |= {"environment": {"TMPDIR": str(tmp_path / "tmp")}}
    with cache_users([{**task, "seconds": ENDLESS}]) as (user,):
        user.go()
        wait_until(lambda: compiles(log))
        children = children_of(user.process.pid)
        user.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in children))
    assert len(list((tmp_path / "tmp").iterdir())) == 1

    run_users([task])

    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("answer", ["fail", "exit"])
def test_eight_processes_fail_with_one_compile_and_one_error(task, log, answer):
    reports = run_users([{**task, "answer": answer, "seconds": 0.2, "load": False}] * 8)

    errors = {json.dumps(report["failed"], sort_keys=True) for report in reports}
    assert len(errors) == 1
    assert len(compiles(log)) == 1
    error = next(iter(reports[0]["failed"].values()))
    assert error["error"] == "CompileError"
    assert "/opt/secret" not in error["log"]
    assert "\x1b" not in error["log"]


def test_a_remembered_failure_fails_at_once_until_it_is_forgotten(task, log, tmp_path, templates):
    run_users([{**task, "answer": "fail", "load": False}])
    settings = settings_for(tmp_path / "cache", tmp_path)
    command = stub_command(templates, log)

    assert build(wanted(1), Lookup(settings), settings, command=command).failed
    assert len(compiles(log)) == 1
    assert build(wanted(1), Lookup(settings), settings, command=command, retry=True).compiled
    assert not list((tmp_path / "cache" / "failures").iterdir())


def test_what_another_process_published_between_look_and_lock_is_not_compiled_again(
    log, tmp_path, templates, monkeypatch
):
    root, (item,) = tmp_path / "cache", wanted(1)
    acquire = Lock.try_acquire

    def acquire_late(lock, what):
        if what == item.specialization.title() and not (root / "artifacts-v1").exists():
            fill(root, [item], templates)
        return acquire(lock, what)

    monkeypatch.setattr(Lock, "try_acquire", acquire_late)
    settings = settings_for(root, tmp_path)
    report = build([item], Lookup(settings), settings, command=stub_command(templates, log))

    assert (root / "artifacts-v1").exists()
    assert (dict(report.compiled), report.hits, compiles(log)) == ({}, 1, [])


def test_one_failing_key_does_not_keep_the_others_from_being_built(log, tmp_path, templates):
    settings = settings_for(tmp_path / "cache", tmp_path)
    items = [*wanted(3), *wanted(1, kernel="unknown"), *wanted(2, start=3)]

    report = build(items, Lookup(settings), settings, command=stub_command(templates, log))

    assert (len(report.compiled), len(report.failed)) == (5, 1)


def test_a_process_that_is_killed_frees_its_slot(task, log):
    task |= {"slots": 1}
    with cache_users([{**task, "seconds": ENDLESS}, {**task, "start": 1}]) as (first, second):
        first.go()
        wait_until(lambda: compiles(log))
        first.process.kill()
        second.go()

        assert len(second.report()["compiled"]) == 1


def test_a_process_without_a_writable_root_compiles_for_itself(task, log):
    reports = run_users([{**task, "root": None, "count": 3}] * 2)

    assert [len(report["compiled"]) for report in reports] == [3, 3]
    assert len(compiles(log)) == 6


def test_the_stub_process_reports_a_wrong_kernel(task, tmp_path, templates):
    """The tests above rely on it: an artifact of another key under this one's record must not go unnoticed."""
    first, second = wanted(2)
    (tmp_path / "cache").mkdir()
    content = artifact_of(second, templates)
    put(Layer(tmp_path / "cache", writable=True), first.key, record_of(first, content), content)
    user = CacheUser(**task)
    user.wait_ready()
    user.go()

    with pytest.raises(AssertionError, match="wrong kernels"):
        user.report()


def test_a_slot_whose_holder_begins_no_compile_is_not_waited_for_forever(task, log, tmp_path):
    """It runs, so that its locks stay; but it hangs in something of its own, such as a collective."""
    held = hold_all_locks(tmp_path, [])
    task |= {"patience_seconds": 1.0}

    with cache_users([task]) as (user,):
        began = time.monotonic()
        user.go()
        assert len(user.report()["compiled"]) == 1
    assert float(log.read_text().split()[2]) - began >= 1.0
    for lock in held:
        lock.release()


def test_slots_whose_holders_begin_compiles_are_waited_for(task, log, tmp_path, monkeypatch):
    held = hold_all_locks(tmp_path, [])
    events = tmp_path / "events"
    task |= {"patience_seconds": 0.5, "report_seconds": 0.2, "events": str(events)}
    later = time.time() + ENDLESS  # so that they have always begun lately
    with monkeypatch.context() as clock:
        clock.setattr("jitspark.cache.lock.time.time", lambda: later)
        for lock in held:
            lock.note("the next of many")

    with cache_users([task]) as (user,):
        user.go()
        wait_until(lambda: any(seconds > 1.0 for _, _, seconds, *_ in told(events, "waiting")))
        assert compiles(log) == []
        for lock in held:
            lock.release()
        assert len(user.report()["compiled"]) == 1


def test_a_slot_names_what_is_compiled_in_it(task, log, tmp_path):
    with cache_users([{**task, "seconds": ENDLESS, "slots": 1}]) as (user,):
        user.go()
        wait_until(lambda: compiles(log))
        holder = Lock(tmp_path / "locks" / "slots" / "0.lock").holder()

    assert (holder.pid, holder.what) == (user.process.pid, "stub(n=0)")


def test_a_holder_in_another_container_is_named_though_its_process_is_not_seen_here(tmp_path):
    lock = Lock(tmp_path / "0.lock")
    (tmp_path / "0.holder").write_text(json.dumps({"pid": 2**22 + 7, "node": "pod-1", "what": "stub", "since": 1.0}))
    assert (lock.holder().node, lock.holder().is_stuck()) == ("pod-1", False)

    (tmp_path / "0.holder").write_text(
        json.dumps({"pid": 2**22 + 7, "node": os.uname().nodename, "what": "stub", "since": 1.0})
    )
    assert lock.holder() is None
