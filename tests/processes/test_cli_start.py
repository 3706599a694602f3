"""How the command line starts: what it imports, which is what a start costs. Its time in milliseconds is measured."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stub_cache

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"jitspark.compiler", "jitspark.building.build"}
# Beside the standard library.
LIGHT = {"annotated_doc", "cache_tools", "click", "jitspark", "shellingham", "typer", "typing_extensions", "zstandard"}
MODULES = 250  # 210 at most today, the interpreter's own among them
# Modules loaded when the command has ended, as JSON on standard error.
RUN = """
import atexit, json, runpy, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
if len(sys.argv) > 1:
    runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def cache(tmp_path):
    """A cache of 20 entries, a pack of it, and the start of a key."""
    templates = stub_cache.make_templates(tmp_path)
    entries = stub_cache.fill(tmp_path / "cache", stub_cache.wanted(20), templates, stub_cache.other_toolchain())
    return {"folder": tmp_path, "KEY": entries[0].key.recipe[:16], "PACK": str(tmp_path / "x.tar")}


def commands(cache):
    pack, root = cache["PACK"], str(cache["folder"] / "cache")
    looking = [["ls"], ["ls", "--json"], ["explain", cache["KEY"]], ["verify"], ["diff", root, root]]
    carrying = [["pack", pack], ["unpack", pack, "--allow-unsigned"], ["merge", f"{pack}.2", pack, "--allow-unsigned"]]
    return [*looking, *carrying, ["verify", pack]]


def modules_after(arguments, **environment):
    result = subprocess.run(
        [sys.executable, "-P", "-c", RUN, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stderr.splitlines()[-1]))


@functools.cache
def before():
    """What an environment's own .pth files import at every start."""
    return modules_after([])


@pytest.mark.parametrize("program", ["jitspark", "cache_tools"])
def test_looking_at_and_carrying_a_cache_imports_little_and_nothing_heavy(cache, program):
    for arguments in commands(cache):
        loaded = modules_after([program, *arguments], JITSPARK_CACHE_DIR=str(cache["folder"] / "cache"))

        assert f"{program}.__main__" in loaded or program in loaded
        foreign = {name.partition(".")[0] for name in loaded - before()} - sys.stdlib_module_names
        assert foreign <= LIGHT, arguments
        assert not loaded & HEAVY, arguments
        assert len(loaded) < MODULES, arguments


def test_a_heavy_import_would_be_seen():
    assert "msgspec" in modules_after(["msgspec.json"]) - before()
