"""How the command line starts: what it does not import, and the processor time that it takes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stub_cache

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {
    "cutlass",
    "torch",
    "tvm_ffi",
    "msgspec",
    "rich",
    "pynvml",
    "pydantic",
    "jitspark.compiler",
    "jitspark.building.build",
}
# Modules loaded when the command has ended, as JSON on standard error.
RUN = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules)), file=sys.stderr))
from {package} import main
main()
"""


@pytest.fixture
def cache(tmp_path):
    """A cache of 20 entries, a pack of it, and the start of a key."""
    templates = stub_cache.make_templates(tmp_path)
    entries = stub_cache.fill(tmp_path / "cache", stub_cache.wanted(20), templates, stub_cache.other_toolchain())
    return {"folder": tmp_path, "KEY": entries[0].key.recipe[:16], "PACK": str(tmp_path / "x.tar")}


def environment(cache):
    own = {"JITSPARK_CACHE_DIR": str(cache["folder"] / "cache"), "PYTHONPATH": str(ROOT)}
    return {**os.environ, **own}


def commands(cache):
    pack, root = cache["PACK"], str(cache["folder"] / "cache")
    looking = [["ls"], ["ls", "--json"], ["explain", cache["KEY"]], ["verify"], ["diff", root, root]]
    carrying = [["pack", pack], ["unpack", pack, "--allow-unsigned"], ["merge", f"{pack}.2", pack, "--allow-unsigned"]]
    return [*looking, *carrying, ["verify", pack]]


def test_looking_at_and_carrying_a_cache_imports_nothing_heavy(cache):
    for arguments in commands(cache):
        code = RUN.format(package="jitspark.cli")
        result = subprocess.run(
            [sys.executable, "-P", "-c", code, *arguments],
            env=environment(cache),
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        loaded = set(json.loads(result.stderr.splitlines()[-1]))

        assert not loaded & HEAVY, arguments


@pytest.mark.parametrize("module", ["jitspark", "cache_tools"])
def test_it_starts_without_a_heavy_import(cache, module):
    for arguments in commands(cache):
        times = [processor_seconds([sys.executable, "-P", "-m", module, *arguments], cache) for _ in range(5)]

        # A guard against importing something heavy, whatever the machine. The bar of 150 ms is no test: it is measured.
        assert min(times) < 0.5, (arguments, times)


def processor_seconds(command, cache):
    process = subprocess.Popen(command, env=environment(cache), stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    return usage.ru_utime + usage.ru_stime
