"""compute-sanitizer's reports: to whose case they belong, and when a run counts as clean. The tool is a stand-in."""

import argparse

import pytest

pytest.importorskip("torch")
from bench.sanitizer import errors_of, line, reports_by_case, run_kernels, run_tool

PRINTED = """========= COMPUTE-SANITIZER
== rmsnorm(hidden_size=512) num_tokens=7
== combine(k=2) num_tokens=1
========= Warning: Race reported between Write access at kernel_cutlass_device_tensorptrbf16_0+0x180
=========     and Read access at kernel_cutlass_device_tensorptrbf16_0+0x1a0 [64 hazards]
=========
2 cases were launched
========= RACECHECK SUMMARY: 1 hazards displayed (0 errors, 1 warnings)
"""
OPTIONS = argparse.Namespace(pack="kernels.tar", cache=None, cases=2, seconds=20.0, jobs=2)


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
    def install(printed, status=0, kernel=""):
        """For one kernel, or for all; each later one beside those before it."""
        (tmp_path / f"printed{kernel}").write_text(printed)
        (tmp_path / f"status{kernel}").write_text(str(status))
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(
            "#!/bin/sh\n"
            f'for word in "$@" ""; do [ -f "{tmp_path}/printed$word" ] && break; done\n'
            f'cat "{tmp_path}/printed$word"; exit $(cat "{tmp_path}/status$word")\n'
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return install


def test_a_complete_run_is_told_by_its_launches_and_its_end(stand_in):
    stand_in(PRINTED)
    found = run_tool("racecheck", "rmsnorm", OPTIONS)
    assert found["complete"] and found["errors"] == 0 and len(found["reports"]) == 1

    stand_in(PRINTED, status=1)
    assert not run_tool("racecheck", "rmsnorm", OPTIONS)["complete"]

    stand_in(PRINTED.replace("2 cases were launched\n", ""))
    assert not run_tool("racecheck", "rmsnorm", OPTIONS)["complete"]

    stand_in("== rmsnorm(hidden_size=512) num_tokens=7\n0 cases were launched\n========= ERROR SUMMARY: 0 errors\n")
    assert not run_tool("memcheck", "rmsnorm", OPTIONS)["complete"]


def test_each_kernel_has_a_process_and_one_that_is_cut_leaves_the_others_told(stand_in):
    stand_in("== rmsnorm() num_tokens=7\n1 cases were launched\n========= ERROR SUMMARY: 0 errors\n", kernel="rmsnorm")
    stand_in(PRINTED.replace("0 errors", "1 errors"), kernel="combine")
    stand_in("== router() num_tokens=8\n", status=9, kernel="router")

    found = run_kernels("racecheck", ["rmsnorm", "combine", "router"], OPTIONS)

    assert [run["complete"] for run in found["kernels"]] == [True, True, False]
    assert not found["complete"] and found["errors"] == 2  # a run without a summary is one
    assert line(found) == "racecheck: 4 cases, 2 errors; 1 reports on 1 of 3 kernels; not complete: router"
