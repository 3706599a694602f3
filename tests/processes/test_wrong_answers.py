"""Compiler children that say what is no answer, or part of one: the build goes on, and nothing bad is published."""

import errno
import os
import signal
from pathlib import Path

import pytest
from stub_cache import compiles, settings_for, stub_command, wanted

from jitspark.building.build import build
from jitspark.building.compiler_child import CompilerChild
from jitspark.cache.lookup import Lookup
from jitspark.errors import CompileError, ToolchainError


@pytest.fixture
def settings(tmp_path):
    return settings_for(tmp_path / "cache", tmp_path)


def test_a_child_that_stops_within_its_answer_blocks_nobody_and_is_ended(settings, templates, monkeypatch, tmp_path):
    """The build goes on: it reports, and gives the hanging child no longer than any."""
    monkeypatch.setattr("jitspark.building.share.REPORT_SECONDS", 0.05)
    told, log = [], tmp_path / "log"
    command = stub_command(templates, log, answer="half")

    def until_its_time_is_over(event):
        told.append(event.kind)
        if told.count("compiling") >= 3 and log.exists() and "said " in log.read_text():
            monkeypatch.setattr("jitspark.building.compiler_child.COMPILE_LIMIT_SECONDS", 0.0)

    report = build(wanted(1), Lookup(settings), settings, command=command, on_event=until_its_time_is_over)

    assert [type(error) for error in report.failed.values()] == [CompileError]
    (pid,) = {int(line.split()[1]) for line in log.read_text().splitlines()}
    assert not Path(f"/proc/{pid}").exists()
    assert not list((tmp_path / "cache").rglob("kernel.so"))


@pytest.mark.parametrize("kind", ["garbage", "null", "twice", "endless", "cut", "odd", "nothing"])
def test_what_is_no_answer_or_no_artifact_fails_the_compile_and_publishes_nothing(settings, templates, kind, tmp_path):
    log = tmp_path / "log"
    command = stub_command(templates, log, answer=kind)

    for _ in range(2):  # the second time it is remembered
        report = build(wanted(1), Lookup(settings), settings, command=command)
        assert [type(error) for error in report.failed.values()] == [CompileError]

    assert len(compiles(log)) == 1
    assert not list((tmp_path / "cache").rglob("kernel.so"))
    assert "\x1b" not in str(report.failed)


def test_a_killed_child_that_cannot_be_replaced_is_one_typed_error_and_frees_every_lock(
    settings, templates, monkeypatch, tmp_path
):
    started = []

    class Child(CompilerChild):
        def __init__(self, *args, **options):
            if started:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            super().__init__(*args, **options)
            started.append(self)

    def kill(event):
        if event.kind == "compiling":
            os.kill(started[0].pid, signal.SIGKILL)

    monkeypatch.setattr("jitspark.building.seats.CompilerChild", Child)
    monkeypatch.setattr("jitspark.building.share.REPORT_SECONDS", 0.1)
    with pytest.raises(ToolchainError, match="no child process"):
        build(
            wanted(1),
            Lookup(settings),
            settings,
            command=stub_command(templates, seconds=3600.0),
            jobs=1,
            on_event=kill,
        )

    monkeypatch.undo()
    assert len(build(wanted(1), Lookup(settings), settings, command=stub_command(templates)).compiled) == 1
    assert not list((tmp_path / "locks").rglob("*.holder"))
