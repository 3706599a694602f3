"""What a test needs is said by its folder: the folder's marker is added here, and a need that is not met skips.

Ends every run with how many tests were skipped, and why.
"""

import functools
import importlib.metadata
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
MARKED_FOLDERS = ("processes", "vllm", "gpu")


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
