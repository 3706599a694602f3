"""compute-sanitizer's reports: to whose case they belong, and when a run counts as clean. The tool is a stand-in."""

import argparse

import pytest

pytest.importorskip("torch")
from bench.sanitizer import errors_of, reports_by_case, run_tool

PRINTED = """========= COMPUTE-SANITIZER
== rmsnorm(hidden_size=512) num_tokens=7
== combine(k=2) num_tokens=1
========= Warning: Race reported between Write access at kernel_cutlass_device_tensorptrbf16_0+0x180
=========     and Read access at kernel_cutlass_device_tensorptrbf16_0+0x1a0 [64 hazards]
=========
2 cases were launched
========= RACECHECK SUMMARY: 1 hazards displayed (0 errors, 1 warnings)
"""
OPTIONS = argparse.Namespace(pack="kernels.tar", cache=None, kernel=[], cases=2, seconds=20.0)


def test_reports_belong_to_the_case_before_them():
    cases, reports, summary = reports_by_case(PRINTED)

    assert cases == ["rmsnorm(hidden_size=512) num_tokens=7", "combine(k=2) num_tokens=1"]
    assert reports == [
        {
            "case": "combine(k=2) num_tokens=1",
            "lines": [
                "Warning: Race reported between Write access at kernel+0x180",
                "and Read access at kernel+0x1a0 [64 hazards]",
            ],
        }
    ]
    assert errors_of(summary) == 0


@pytest.mark.parametrize(
    ("summary", "errors"), [("ERROR SUMMARY: 0 errors", 0), ("ERROR SUMMARY: 3 errors", 3), ("killed", -1), ("", -1)]
)
def test_a_run_without_a_summary_is_no_clean_run(summary, errors):
    assert errors_of(summary) == errors


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    def install(printed, status=0):
        (tmp_path / "printed").write_text(printed)
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(f"#!/bin/sh\ncat {tmp_path}/printed\nexit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


def test_a_complete_run_is_told_by_its_launches_and_its_end(stand_in):
    stand_in(PRINTED)
    found = run_tool("racecheck", OPTIONS)
    assert found["complete"] and found["errors"] == 0 and len(found["reports"]) == 1

    stand_in(PRINTED, status=1)
    assert not run_tool("racecheck", OPTIONS)["complete"]

    stand_in(PRINTED.replace("2 cases were launched\n", ""))
    assert not run_tool("racecheck", OPTIONS)["complete"]

    stand_in("== rmsnorm(hidden_size=512) num_tokens=7\n0 cases were launched\n========= ERROR SUMMARY: 0 errors\n")
    assert not run_tool("memcheck", OPTIONS)["complete"]
