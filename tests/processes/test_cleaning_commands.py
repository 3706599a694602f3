"""`verify`, `prune` and `stats` as people run them, by either program."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from stub_cache import fill, wanted

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ("jitspark", "cache_tools")


@pytest.fixture
def cache(tmp_path, templates):
    fill(tmp_path / "cache", wanted(3), templates)
    return tmp_path / "cache"


def run(program, *arguments, cache):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JITSPARK_")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "JITSPARK_CACHE_DIR": str(cache), "COLUMNS": "200"}
    environment |= {"XDG_RUNTIME_DIR": str(cache.parent)}
    command = [sys.executable, "-P", "-m", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize("program", PROGRAMS)
def test_verify_passes_a_good_cache_and_fails_a_bad_one(program, cache):
    good = run(program, "verify", cache=cache)
    path = next(cache.rglob("kernel.so"))
    path.chmod(0o644)
    path.write_bytes(b"damage")
    bad = run(program, "verify", "--json", cache=cache)

    assert (good.returncode, good.stdout.startswith("3 entries, 0 bad")) == (0, True), good.stderr
    assert bad.returncode == 1
    assert [Path(each["where"]) for each in json.loads(bad.stdout)["bad"]] == [path.parent]


@pytest.mark.parametrize("program", PROGRAMS)
def test_prune_takes_all_its_rules_at_once(program, cache):
    (cache / "artifacts-v0").mkdir()
    rules = ("--max-size", "2GB", "--unused-for", "30d", "--other-toolchains", "--old-layouts")

    dry = run(program, "prune", *rules, "--dry-run", cache=cache)
    assert (cache / "artifacts-v0").exists()
    done = run(program, "prune", *rules, "--json", cache=cache)

    assert "would remove" in dry.stdout
    assert [each["why"] for each in json.loads(done.stdout)["removed"]] == ["another layout's"]
    assert json.loads(done.stdout)["kept"] == 3
    assert not (cache / "artifacts-v0").exists()


@pytest.mark.parametrize("rule", [("--max-size", "2XB"), ("--unused-for", "soon")])
def test_prune_refuses_what_is_no_quantity_and_removes_nothing(cache, rule):
    done = run("jitspark", "prune", *rule, cache=cache)

    assert done.returncode == 2
    assert rule[0] in done.stderr
    assert len(list(cache.rglob("kernel.so"))) == 3


def test_prune_to_nothing_leaves_nothing(cache):
    done = run("jitspark", "prune", "--max-size", "0", cache=cache)

    assert done.returncode == 0, done.stderr
    assert list(cache.rglob("kernel.so")) == []


def test_stats_tell_entries_per_kernel_and_layer(cache):
    done = run("jitspark", "stats", "--json", cache=cache)

    (row,) = json.loads(done.stdout)["rows"]
    assert (row["kernel"], row["layer"], row["entries"]) == ("stub", str(cache), 3)
    assert row["bytes"] > 3 * 10_000
