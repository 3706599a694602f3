"""Faults at every step of what touches files: a child is killed at step n, or step n fails, for all n.

A step is a call that may change or open a file: whatever Python's audit events see, each `fsync`, and the middle of
each whole-file write. The child is forked, so nothing of it stays in the test.
"""

import os
import pathlib
import signal
import sys
import traceback

_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.link", "os.symlink", "os.utime"}
_UNEXPECTED = 97


class _Steps:
    """Counts steps and strikes at one of them."""

    def __init__(self, number, strike):
        self.left = number
        self.strike = strike

    def step(self):
        self.left -= 1
        if self.left == 0:
            self.strike()

    def install(self):
        sys.addaudithook(lambda event, _: self.step() if event in _EVENTS else None)
        fsync = os.fsync

        def counted_fsync(descriptor):
            self.step()
            fsync(descriptor)

        def write_in_halves(path, content):
            with path.open("wb", buffering=0) as stream:
                stream.write(content[: len(content) // 2])
                self.step()
                stream.write(content[len(content) // 2 :])

        os.fsync = counted_fsync
        pathlib.Path.write_bytes = write_in_halves


def _run(action, number, strike):
    """The child's wait status, and what it wrote."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = _UNEXPECTED
        try:
            os.close(reader)
            _Steps(number, strike).install()
            os.write(writer, str(action()).encode()[:4000])
            status = 0
        except BaseException:  # noqa: BLE001 - told to the parent, which fails on it
            os.write(writer, traceback.format_exc().encode()[-4000:])
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read().decode()
    return os.waitpid(pid, 0)[1], said


def killed_at(action, number):
    """Run `action` in a child that is killed at step `number`. False when the action has fewer steps."""
    status, said = _run(action, number, lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, said
    return os.WIFSIGNALED(status)


def failed_at(action, number, error):
    """What `action` returns in a child whose step `number` fails with this errno, and whether there is such a step."""
    struck = []

    def strike():
        struck.append(number)
        raise OSError(error, os.strerror(error))

    def told():
        result = action()
        return f"{bool(struck)} {result}"

    status, said = _run(told, number, strike)
    assert os.waitstatus_to_exitcode(status) == 0, said
    hit, _, result = said.partition(" ")
    return result, hit == "True"


def every_step(run, limit=400):
    """Call `run(number)` for 1, 2, ... until it says that there is no such step; how many there are."""
    for number in range(1, limit):
        if not run(number):
            return number - 1
    raise AssertionError(f"more than {limit} steps")
