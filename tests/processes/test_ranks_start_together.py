"""Four ranks over gloo, one cold cache: all have their kernels, all fail with the reason of one, or all run stock."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from rank_processes import ENVIRONMENT
from stub_cache import LIMIT, compiles, make_templates

TESTS = Path(__file__).resolve().parents[1]
RANKS = 4
# nobody waits for such a compile to end: it would outlast the test
ENDLESS = {"keys": 60, "seconds": 3600.0}
AMID = {"amid_compiles": True}


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return make_templates(tmp_path_factory.mktemp("templates"))


def start(folder, templates, **task):
    """What each rank says, in rank order; None for one that died."""
    content = {"folder": str(folder), "ranks": RANKS, "templates": str(templates), **task}
    (folder / "task.json").write_text(json.dumps(content))
    command = [sys.executable, "-P", str(TESTS / "rank_start.py"), str(folder / "task.json")]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, timeout=LIMIT, env={**os.environ, **ENVIRONMENT}
    )
    said = {each["rank"]: each for each in map(json.loads, ran.stdout.splitlines())}
    return [said.get(rank) for rank in range(RANKS)]


def test_all_ranks_have_everything_and_each_key_is_compiled_once(tmp_path, templates):
    said = start(tmp_path, templates, keys=12, seconds=0.05)

    assert [rank.get("has") for rank in said] == [12] * RANKS, said
    assert len(compiles(tmp_path / "compiles.log")) == 12


@pytest.mark.parametrize("failing", [0, 2])
def test_all_fail_at_once_with_the_reason_of_the_one_that_cannot(tmp_path, templates, failing):
    said = start(tmp_path, templates, **ENDLESS, fault={"rank": failing, "kind": "missing", **AMID})

    assert said[failing]["error"] == "MissingEntriesError"
    for rank, each in enumerate(said):
        assert "1 missing: stub/" in each["text"], each
        if rank != failing:
            assert each["error"] == "RankError"
            assert each["text"].startswith(f"rank {failing}: "), each


def test_all_run_stock_where_that_is_chosen(tmp_path, templates):
    said = start(tmp_path, templates, **ENDLESS, on_error="stock", fault={"rank": 1, "kind": "missing", **AMID})

    assert [rank.get("has") for rank in said] == ["stock"] * RANKS, said


@pytest.mark.parametrize("on_error", ["raise", "stock"])
def test_an_error_of_no_known_kind_ends_all_whatever_is_chosen(tmp_path, templates, on_error):
    said = start(tmp_path, templates, **ENDLESS, on_error=on_error, fault={"rank": 3, "kind": "bug"})

    assert said[3]["error"] == "RuntimeError"
    for each in said[:3]:
        assert each["error"] == "RankError", each
        assert "rank 3: found an error of no known kind, RuntimeError: something nobody has thought of" in each["text"]


@pytest.mark.parametrize("on_error", ["raise", "stock"])
def test_a_rank_that_dies_ends_all_whatever_is_chosen(tmp_path, templates, on_error):
    said = start(tmp_path, templates, **ENDLESS, on_error=on_error, fault={"rank": 2, "kind": "death", **AMID})

    assert said[2] is None
    for rank in (0, 1, 3):
        assert said[rank]["error"] == "RankError", said[rank]
        assert "rank 2" in said[rank]["text"], said[rank]


def test_ranks_with_other_plans_do_not_go_on(tmp_path, templates):
    said = start(tmp_path, templates, keys=2, seconds=0.0, fault={"rank": 1, "kind": "other plans"})

    assert {rank["error"] for rank in said} == {"RankError"}
    assert all("plans and kernels others, where rank 0 has plans and kernels these" in rank["text"] for rank in said)
