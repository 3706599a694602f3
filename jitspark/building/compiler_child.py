"""A compiler child: one process that compiles what it is handed, one specialization at a time.

It is never waited for: an answer is read as far as it has come, so that a child which hangs blocks nobody.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitspark.errors import CompileError, JitsparkError
from jitspark.key import Key
from jitspark.settings import child_environment
from jitspark.spec import Specialization

COMMAND = (sys.executable, "-m", "jitspark.compiler")
# A child grows by about 2 MB a compile.
COMPILES_PER_CHILD = 50
COMPILE_LIMIT_SECONDS = 900.0
MAX_ANSWER_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """What a compile reported, in the words of `jitspark.compiler.compile.Compiled`."""

    signature: str
    needs: tuple[str, ...]
    seconds: float


class CompilerChild:
    """Start with `CompilerChild(command)` and `ask`; `answer` whenever `fileno()` is readable; at last `close`."""

    def __init__(self, command: tuple[str, ...] = COMMAND, beside: Path | None = None) -> None:
        """Start the child; its home and temporary files go below `beside`, or else in the system's place for them."""
        prefix = f"{os.uname().nodename}.{os.getpid()}."
        self._home = tempfile.TemporaryDirectory(prefix=prefix, dir=beside, ignore_cleanup_errors=True)
        home = Path(self._home.name)
        self._log = (home / "log").open("w+b")
        self._process = subprocess.Popen(
            [*command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=child_environment(home),
            cwd=home,
            bufsize=0,
        )
        os.set_blocking(self.fileno(), False)
        self._said = b""
        self.compiles = 0
        self.asked_at = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def worn(self) -> bool:
        return self.compiles >= COMPILES_PER_CHILD

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def ask(self, specialization: Specialization, key: Key, directory: Path) -> None:
        """Hand over a compile into `directory`. A child that is gone shows when its answer is read."""
        request = {
            "kernel": specialization.name,
            "axes": dict(specialization.axes),
            "dtypes": dict(specialization.dtypes),
            "statics": dict(specialization.statics),
            "target": key.target,
            "recipe": key.recipe,
            "directory": str(directory.absolute()),
        }
        self.compiles += 1
        self.asked_at = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def overdue(self) -> bool:
        return time.monotonic() - self.asked_at > COMPILE_LIMIT_SECONDS

    def answer(self) -> Answer | None:
        """The answer to the last `ask`, None while there is no whole one; never waits for it.

        Raises the error that the child reported, or ChildDied when it ended or says what is no answer.
        """
        try:
            more = os.read(self.fileno(), MAX_ANSWER_BYTES)
        except BlockingIOError:
            return None
        self._said += more
        line, whole, rest = self._said.partition(b"\n")
        if not more:
            raise self._died()
        if rest or len(line) > MAX_ANSWER_BYTES:  # a second answer would be taken for the next one's
            raise self._makes_no_sense(self._said)
        if not whole:
            return None
        self._said = b""
        answer = _answer_in(line)
        if answer is None:
            raise self._makes_no_sense(line)
        if isinstance(answer, JitsparkError):
            raise answer
        return answer

    def _died(self) -> "ChildDied":
        """What it ended with, once its output has ended. That may be a while before its end can be seen."""
        self._process.kill()  # changes no status: that is settled before files are closed
        return ChildDied(self._process.wait(), self._log_with(self._said))

    def _makes_no_sense(self, said: bytes) -> "ChildDied":
        self._process.kill()
        self._process.wait()
        return ChildDied(None, self._log_with(said))

    def _log_with(self, said: bytes) -> str:
        self._log.seek(0)
        log = (self._log.read()[-8000:] + said[-500:]).decode(errors="replace")
        return log.replace(self._home.name, ".").strip()

    def close(self) -> None:
        """End the child, at once: it is idle, dead, or no longer wanted."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._home.cleanup()


def _answer_in(line: bytes) -> Answer | JitsparkError | None:
    """What a line of the child's says; None for what is no answer."""
    try:
        value: Any = json.loads(line)
        if "error" not in value:
            return Answer(str(value["signature"]), tuple(map(str, value["needs"])), float(value["seconds"]))
        return JitsparkError.from_json({name: str(item) for name, item in value.items()})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


class ChildDied(Exception):
    """The child ended without an answer, or was ended for saying what is none (`status` None).

    `killed`: from outside, so the same compile may well succeed again.
    """

    def __init__(self, status: int | None, log: str) -> None:
        super().__init__(status, log)
        self.status = status
        self.log = log

    @property
    def killed(self) -> bool:
        return self.status in (-9, -15)

    def as_error(self, where: str) -> CompileError:
        how = "was ended: it said what is no answer"
        if self.status is not None:
            how = f"ended with {'signal' if self.status < 0 else 'status'} {abs(self.status)} and no answer"
        return CompileError(
            where=where,
            found=f"the compiler {how}",
            needed="a compiled kernel",
            remedy="See the log; `jitspark doctor` checks the toolchain.",
            log=self.log,
        )
