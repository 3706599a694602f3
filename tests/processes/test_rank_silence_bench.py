"""What `python -m bench.rank_silence` says of ranks that end as they must, and of those that do not."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from bench import rank_silence  # noqa: E402

TOLD = {"error": "RankError", "found": "nothing from rank 1 in time"}
RANK = """
import json, sys, time
def say(**told): print(json.dumps({**told, "at": time.time()}), flush=True)
say(ready=200)
time.sleep(%s)
say(**%r)
"""


def ranks(first):
    """Processes: rank 0 says `first` two seconds after it was ready, and rank 1 nothing until it is killed."""
    sources = (RANK % (2, first), RANK % (600, {}))
    return [subprocess.Popen([sys.executable, "-c", each], stdout=subprocess.PIPE, text=True) for each in sources]


def silenced(started, how="kill"):
    options = rank_silence._parser().parse_args(["--cache", "unused", "--how", how, "--timeout", "0.5"])
    try:
        return rank_silence._silenced(started, options)
    finally:
        for each in started:
            each.kill()
            each.wait()


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_rank_that_names_the_silent_one_in_time_is_right(how):
    started = ranks(TOLD)

    found = silenced(started, how)

    assert found["problems"] == []
    (other,) = found["others"]
    assert other["status"] == 0
    assert started[1].returncode == -9


@pytest.mark.parametrize(
    "first",
    [{"replays": 9000}, {**TOLD, "found": "nothing from rank 0 in time"}, {**TOLD, "error": "BindingError"}],
    ids=["went on", "named another", "another error"],
)
def test_a_rank_that_does_not_tell_of_the_silent_one_is_a_problem(first):
    found = silenced(ranks(first))

    assert len(found["problems"]) == 1


def test_a_rank_that_is_told_too_late_is_a_problem(monkeypatch):
    monkeypatch.setattr(rank_silence, "SLACK", -0.9)

    found = silenced(ranks(TOLD))

    assert "where 0.1 are enough" in found["problems"][0]
