"""One compiler child: what it answers, and what it refuses to answer for."""

import json
import os
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from stub_cache import LIMIT, wait_until

from jitspark.building.build import wanted_for
from jitspark.building.compiler_child import COMMAND, ChildDied, CompilerChild
from jitspark.errors import SpecError
from jitspark.geometry import deployment
from jitspark.registry import specializations


def answer_of(child):
    """The child's answer, waited for."""
    select.select([child], [], [], LIMIT)
    return wait_until(child.answer)


@pytest.fixture
def child():
    child = CompilerChild()
    yield child
    child.close()


def test_bytes_of_other_sources_than_the_key_says_are_refused(child, tmp_path):
    (item, *_) = wanted_for(specializations(deployment("tiny", 1), ["rmsnorm"]), ["sm_90a"])
    child.ask(item.specialization, replace(item.key, recipe="0" * 64), tmp_path)
    with pytest.raises(SpecError, match="changed after its key was made"):
        answer_of(child)

    child.ask(item.specialization, item.key, tmp_path)
    assert "Tensor(" in answer_of(child).signature


ENDINGS = {
    "an exit": ("sys.exit(3)", 3),
    "a crash": ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    "half an answer, and killed": ("os.write(1, b'{'); os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    "no output any more, though it lives": ("os.close(1); time.sleep(3600)", -signal.SIGKILL),
    "no answer, though it lives": ("os.write(1, b'hello\\n'); time.sleep(3600)", None),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_how_a_child_ended_is_known_without_waiting_for_a_time(ending):
    code, status = ENDINGS[ending]
    child = CompilerChild((sys.executable, "-c", f"import os, signal, sys, time; os.write(2, b'said'); {code}"))
    try:
        with pytest.raises(ChildDied) as death:
            answer_of(child)
        assert (death.value.status, death.value.killed) == (status, status == -signal.SIGKILL)
        assert death.value.log.startswith("said")
    finally:
        child.close()


def command_line(pid):
    """Empty once the process has ended, whether or not somebody has looked at its end."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_a_child_dies_with_its_parent_though_its_input_stays_open():
    """A child that compiles does not look at its input, which ends when the parent does: something else must end it."""
    start = (
        "child = subprocess.Popen([*sys.argv[1:], str(os.getpid())]); print(child.pid, flush=True); time.sleep(3600)"
    )
    questions, ours = os.pipe()
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import os, subprocess, sys, time; {start}", *COMMAND],
        stdin=questions,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
    )
    try:
        pid = int(parent.stdout.readline())
        os.write(ours, b'{"kernel": "unheard_of", "axes": {}, "dtypes": {}, "statics": {}}\n')
        assert json.loads(parent.stdout.readline())["error"] == "SpecError"  # it is at work
        assert b"jitspark.compiler" in command_line(pid)
        parent.kill()

        wait_until(lambda: not command_line(pid))
    finally:
        parent.kill()
        os.close(ours)  # ends a child that is still there
        parent.communicate()
        os.close(questions)
