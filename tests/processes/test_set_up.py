"""bin/set-up.sh: one set-up however many start at once, none that was cut short is ever used."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from stub_cache import LIMIT, wait_until

BIN = Path(__file__).resolve().parents[2] / "bin"
# `pip install pip` is satisfied at once: what is tested is the making of environments, not of this package's
SCRIPT = """#!/usr/bin/env bash
. "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/set-up.sh"
ready .venv ${INSTALL:-pip}
exec "$root/.venv/bin/python" -P -c 'import sys; print(sys.prefix, *sys.argv[1:]); sys.exit(len(sys.argv) - 1)' "$@"
"""
ONCE = "setting up .venv, once"


@pytest.fixture
def checkout(tmp_path):
    """A small checkout whose path has a space, with bin/tool beside the real set-up.sh."""
    root = tmp_path / "a checkout"
    (root / "bin").mkdir(parents=True)
    shutil.copy(BIN / "set-up.sh", root / "bin")
    (root / "pyproject.toml").write_text("[project]\nname = 'tool'\n", encoding="utf-8")
    (root / "bin/tool").write_text(SCRIPT, encoding="utf-8")
    (root / "bin/tool").chmod(0o755)
    return root


def start(checkout, *arguments, **environment):
    return subprocess.Popen(
        [checkout / "bin/tool", *arguments],
        cwd="/",
        env={**os.environ, "PYTHON": sys.executable, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process):
    out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def run(checkout, *arguments, **environment):
    return finish(start(checkout, *arguments, **environment))


def test_eight_at_once_set_up_once(checkout):
    results = [finish(process) for process in [start(checkout) for _ in range(8)]]

    assert [(code, out) for code, out, _ in results] == [(0, f"{checkout}/.venv\n")] * 8
    assert sum(ONCE in err for _, _, err in results) == 1


def test_arguments_and_exit_codes_pass_through_and_the_second_run_is_quiet(checkout):
    run(checkout)

    assert run(checkout, "one", "two words") == (2, f"{checkout}/.venv one two words\n", "")


def test_a_link_to_the_command_finds_its_checkout(checkout, tmp_path):
    run(checkout)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/tool").symlink_to(checkout / "bin/tool")

    assert run(tmp_path) == (0, f"{checkout}/.venv\n", "")


def test_a_changed_pyproject_and_a_copied_checkout_are_set_up_again(checkout, tmp_path):
    run(checkout)
    with (checkout / "pyproject.toml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    shutil.copytree(checkout, tmp_path / "copy", symlinks=True)

    assert ONCE in run(checkout)[2]
    code, out, err = run(tmp_path / "copy")
    assert (code, out) == (0, f"{tmp_path}/copy/.venv\n")
    assert ONCE in err


@pytest.fixture
def in_the_midst(checkout):
    """A set-up whose pip waits for a package index that takes the call and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        index.settimeout(LIMIT)
        place = f"http://127.0.0.1:{index.getsockname()[1]}/"
        process = start(checkout, INSTALL="a-package", PIP_INDEX_URL=place, PIP_DEFAULT_TIMEOUT="3600", NO_PROXY="*")
        with index.accept()[0]:
            yield process
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_set_up_that_is_killed_is_made_anew(checkout, in_the_midst):
    os.killpg(in_the_midst.pid, signal.SIGKILL)
    in_the_midst.communicate()
    (checkout / ".venv/half-made").touch()

    code, _, err = run(checkout)

    assert code == 0
    assert ONCE in err
    assert not (checkout / ".venv/half-made").exists()


def test_a_waiter_takes_over_when_the_one_that_sets_up_is_killed(checkout, in_the_midst):
    second = start(checkout)
    wait_until(lambda: "-> " in locks_on(checkout))
    os.killpg(in_the_midst.pid, signal.SIGKILL)
    in_the_midst.communicate()

    assert finish(second)[:2] == (0, f"{checkout}/.venv\n")


def locks_on(path):
    """The lines of the kernel's list of locks that are about this file; those who wait have an arrow."""
    lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    return "\n".join(line for line in lines if f":{path.stat().st_ino} " in line)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PYTHON": "/no/such/python"}, "no usable Python (/no/such/python). Install Python 3.11"),
        ({"PYTHON": "false"}, "no usable Python (false)"),
        ({"INSTALL": "./no-such-package"}, "pip could not install ./no-such-package. Mend what pip says above"),
    ],
    ids=["missing", "unusable", "pip fails"],
)
def test_a_set_up_that_fails_says_why_and_leaves_no_stamp(checkout, environment, said):
    code, out, err = run(checkout, **environment)

    assert (code, out) == (5, "")
    assert said in err
    assert not (checkout / ".venv/stamp").exists()


def test_a_shim_that_does_not_work_is_passed_over(checkout, tmp_path):
    shims = tmp_path / "shims"
    shims.mkdir()
    (shims / "python3").write_text("#!/bin/sh\necho 'python3: command not found' >&2; exit 127\n", encoding="utf-8")
    (shims / "python3").chmod(0o755)
    (shims / "python3.11").symlink_to(shutil.which("true"))
    (shims / "python3.12").symlink_to(Path(sys.executable).resolve())

    code, out, _ = run(checkout, PYTHON="", PATH=f"{shims}:/usr/bin:/bin")

    assert (code, out) == (0, f"{checkout}/.venv\n")
