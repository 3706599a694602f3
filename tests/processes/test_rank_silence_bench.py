"""What `python -m bench.rank_silence` says of ranks that end as they must, and of those that do not."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from bench import rank_silence  # noqa: E402

TOLD = {"error": "RankError", "found": "nothing from rank 1 in time"}
SAY = """
import json, sys, time
from pathlib import Path
def say(**told): print(json.dumps({**told, "at": time.time()}), flush=True)
say(ready=200)
"""
SILENT = f"{SAY}time.sleep(3600)"
# the other one's state, behind its name in parentheses: stopped, or ended and not yet waited for
TELLING = f"""{SAY}
state = Path(f"/proc/{{sys.argv[1]}}/stat")
while state.exists() and state.read_text().rpartition(")")[2].split()[0] not in "TZ":
    time.sleep(0.01)
time.sleep(0.2)
say(**json.loads(sys.argv[2]))
"""


def python(*arguments):
    return subprocess.Popen([sys.executable, "-c", *arguments], stdout=subprocess.PIPE, text=True)


def ranks(first):
    """Processes: rank 0 says `first` a while after rank 1 was killed or stopped, and rank 1 says nothing."""
    silent = python(SILENT)
    return [python(TELLING, str(silent.pid), json.dumps(first)), silent]


@pytest.fixture(autouse=True)
def time_enough(monkeypatch):
    monkeypatch.setattr(rank_silence, "SLACK", 600.0)


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
