"""Public threads about what each start costs, each replayed; docs/scenarios.md has the table."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stub_cache import compiles, fill, lookup_in, run_users, settings_for, stub_command, wanted

from jitspark.building.build import build
from jitspark.cache.lookup import Lookup
from jitspark.errors import MissingEntriesError
from jitspark.settings import from_environment

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.parametrize("count", [1, 50])
def test_a_second_process_compiles_nothing(task, tmp_path, count):
    """cutlass#3398, cutlass#3402, flashinfer#4317: each engine compiles each kernel shape again."""
    task |= {"count": count}
    first = run_users([task])
    second = run_users([task])

    assert (len(first[0]["compiled"]), first[0]["hits"]) == (count, 0)
    assert (len(second[0]["compiled"]), second[0]["hits"]) == (0, count)
    assert len(compiles(tmp_path / "log")) == count


def test_after_a_strict_start_nothing_can_compile(tmp_path, templates):
    """vllm#47458: a stall of 17.5 s on a new shape while serving. What is served exists before, or the start fails."""
    settings = settings_for(tmp_path / "cache", tmp_path, compile="never")
    layer = fill(tmp_path / "cache", wanted(3), templates)[0].layer
    no_compiler = ("/nowhere/no-compiler",)

    assert build(wanted(3), lookup_in(layer), settings, command=no_compiler).hits == 3
    with pytest.raises(MissingEntriesError):
        build(wanted(4), lookup_in(layer), settings, command=no_compiler)


def test_a_warm_process_needs_no_compiler_at_all(task, tmp_path, templates):
    """vllm#49349: no JIT at run time. Importing the compiler fails here, and loading does not notice."""
    fill(tmp_path / "cache", wanted(4), templates)

    reports = run_users([{**task, "count": 4, "forbid_compiler": True, "compile": "never"}])

    assert reports[0]["hits"] == 4


def jitspark(*arguments, **environment):
    command = [sys.executable, "-P", "-m", "jitspark", *arguments]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JITSPARK_")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_strict_warm_only_looks_up_and_says_what_it_would_have_compiled(tmp_path):
    """vllm#47456: kernels that are built already should only be loaded."""
    environment = {"JITSPARK_COMPILE": "never", "JITSPARK_CACHE_DIR": str(tmp_path / "cache")}

    done = jitspark("warm", "--tp", "8", "--target", "sm_90a", "--kernel", "rmsnorm", "--json", **environment)

    error = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 7, done.stderr
    assert error["error"] == "MissingEntriesError"
    assert len(error["keys"]) > 3
    assert "jitspark warm --tp 8" in error["remedy"]


def test_two_containers_on_one_volume_compile_once(task, tmp_path):
    """sglang#29170: compiling at every start. The second container has another home, host name and lock directory."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    run_users([{**task, "count": 3}])

    reports = run_users(
        [
            {
                **task,
                "count": 3,
                "folder": str(tmp_path / "second"),
                "environment": {"HOME": str(tmp_path / "second"), "TMPDIR": str(tmp_path / "second"), "USER": "other"},
            }
        ]
    )

    assert (reports[0]["hits"], len(compiles(tmp_path / "log"))) == (3, 3)


def test_with_nothing_set_the_second_run_hits(tmp_path, templates):
    """flash-attention#2647: a persistent cache that is off by default."""
    settings = from_environment({"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)})
    command = stub_command(templates)

    first = build(wanted(2), Lookup(settings), settings, command=command)
    second = build(wanted(2), Lookup(settings), settings, command=command)

    assert (len(first.compiled), second.hits) == (2, 2)
    assert settings.cache_dir == tmp_path / ".cache" / "jitspark"
