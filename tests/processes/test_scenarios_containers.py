"""Public threads about containers, permissions and offline machines, each replayed; docs/scenarios.md has the table."""

import logging
import os
import shutil
import subprocess

import pytest
from other_user import NOBODY, as_nobody
from stub_cache import fill, run_users, settings_for, wanted

from jitspark.building.build import build
from jitspark.cache.lookup import Lookup

# A compiler that other users can start, whatever may keep them from this Python; the template's number is its answer.
SHELL_COMPILER = """
while read -r line; do
    directory=$(printf %s "$line" | sed 's/.*"directory": "\\([^"]*\\)".*/\\1/')
    cp "$TEMPLATE" "$directory/kernel.so"
    echo '{"signature": "stub()", "needs": [], "seconds": 0.0}'
done
"""


def can_leave_the_network():
    works = shutil.which("unshare") and subprocess.run(["unshare", "-n", "true"], capture_output=True, check=False)
    return bool(works) and works.returncode == 0


@pytest.fixture
def image(tmp_path, templates):
    """A root-owned read-only mount with one entry, as a container image has it."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount and become another user")
    root = tmp_path / "image"
    root.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=755", "tmpfs", str(root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("tmpfs cannot be mounted")
    fill(root, wanted(1), templates)
    subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
    for folder in (tmp_path, *tmp_path.parents):
        if str(folder) not in ("/", "/tmp"):
            folder.chmod(0o755)
    yield root
    subprocess.run(["umount", str(root)], check=True)


def test_another_user_on_a_read_only_image_hits_then_overlays_then_uses_memory(image, tmp_path, templates, caplog):
    """aws-do-eks#42, aws-do-eks#43, dynamo#11154, LLMFlux#124: a package directory that cannot be written to."""
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, NOBODY, NOBODY)
    template = tmp_path / "template.so"
    shutil.copy(templates / "stub.so", template)
    template.chmod(0o644)
    command = ("/bin/sh", "-c", f"TEMPLATE={template}\n{SHELL_COMPILER}")
    logging.getLogger("jitspark").propagate = True

    def served(cache_dir, folder=own):
        settings = settings_for(cache_dir, folder, cache_path=(image,))
        caplog.clear()
        report = build(wanted(2), Lookup(settings), settings, command=command)
        layers = ["memory" if e.layer is None else e.layer.root.name for e in report.entries.values()]
        return layers, len(report.compiled), len([r for r in caplog.records if r.levelno >= logging.WARNING])

    served(tmp_path / "first", tmp_path)  # imports everything, which the other user may not be able to
    assert as_nobody(lambda: served(own / "cache")) == "(['image', 'cache'], 1, 0)"
    assert as_nobody(lambda: served(own / "cache")) == "(['image', 'cache'], 0, 0)"
    assert as_nobody(lambda: served(image)) == "(['image', 'memory'], 1, 1)"


@pytest.mark.skipif(not can_leave_the_network(), reason="a network namespace cannot be made")
def test_without_a_network_everything_is_listed_in_one_error_and_what_is_there_loads(tmp_path, templates):
    """flashinfer#2941, flashinfer#1352, flashinfer#2093: hidden downloads, or JIT in spite of prebuilt wheels."""
    fill(tmp_path / "cache", wanted(3), templates)
    task = {"root": str(tmp_path / "cache"), "folder": str(tmp_path), "templates": str(templates)}
    task |= {"under": ["unshare", "-n"], "compile": "never", "forbid_compiler": True}

    reports = run_users([{**task, "count": 3}, {**task, "count": 9}])

    assert reports[0]["hits"] == 3
    assert reports[1]["error"]["error"] == "MissingEntriesError"
    assert len(reports[1]["error"]["keys"]) == 6
