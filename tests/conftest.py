"""What a test needs is said by its folder: the folder's marker is added here, and a need that is not met skips.

Ends every run with how many tests were skipped, and why.
"""

import functools
import importlib.metadata
import importlib.util
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MARKED_FOLDERS = ("processes", "vllm", "gpu")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config):
    """Gives this session a folder of its own for files, and all of hypothesis the same examples on any machine.

    Sessions share pytest's own folder in /tmp, and each closes it to other users when it starts, while tests of another
    one let other users read there. The folder goes with the session unless something failed.
    """
    if config.option.basetemp is None:
        config.option.basetemp = tempfile.mkdtemp(prefix="jitspark-tests-")
        config.own_basetemp = config.option.basetemp
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]  # says nothing of a test on a machine that others use too
        settings.register_profile("alike", deadline=None, derandomize=True, database=None, suppress_health_check=slow)
        settings.load_profile("alike")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    made = getattr(session.config, "own_basetemp", None)
    if made is not None and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        shutil.rmtree(made, ignore_errors=True)


def pytest_collection_modifyitems(items):
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in MARKED_FOLDERS:
            item.add_marker(folder)


def pytest_runtest_setup(item):
    for marker, unmet in (("vllm", _no_vllm), ("gpu", _no_gpu)):
        reason = unmet() if item.get_closest_marker(marker) else None
        if reason is not None:
            pytest.skip(reason)


@functools.cache
def _no_vllm():
    # by its metadata: tests/ is on the path, so that the name `vllm` finds the folder of tests
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "vLLM is not installed; bin/test-vllm installs it"
    return None


@functools.cache
def _no_gpu():
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "no GPU that torch can use"


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    terminalreporter.section(f"{len(skipped)} skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} x {reason}")
