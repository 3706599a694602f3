"""A compiler child: one process that compiles what it is handed, one specialization at a time."""

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


@dataclass(frozen=True, slots=True)
class Answer:
    """What a compile reported, in the words of `jitspark.compiler.compile.Compiled`."""

    signature: str
    needs: tuple[str, ...]
    seconds: float


class CompilerChild:
    """Start with `CompilerChild(command)`, `ask`, wait until `fileno()` is readable, `answer`, at last `close`."""

    def __init__(self, command: tuple[str, ...] = COMMAND, beside: Path | None = None) -> None:
        """Start the child; its home and temporary files go below `beside` (default: the system's temporary directory)."""
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
        )
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
            self._process.stdin.flush()

    def overdue(self) -> bool:
        return time.monotonic() - self.asked_at > COMPILE_LIMIT_SECONDS

    def answer(self) -> Answer:
        """The answer to the last `ask`. Raises the error that the child reported, or ChildDied when it ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            value: Any = json.loads(line)
            if "error" in value:
                raise JitsparkError.from_json(value)
            return Answer(str(value["signature"]), tuple(value["needs"]), float(value["seconds"]))
        except (ValueError, TypeError, KeyError):
            raise self._died(line) from None

    def _died(self, line: bytes) -> "ChildDied":
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1.0)  # its end and the end of its output are not one moment
        self._process.kill()
        status = self._process.wait()
        self._log.seek(0)
        log = (self._log.read()[-8000:] + line[-500:]).decode(errors="replace").replace(self._home.name, ".")
        return ChildDied(status, log.strip())

    def close(self) -> None:
        """End the child, at once: it is idle, dead, or no longer wanted."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self._home.cleanup()


class ChildDied(Exception):
    """The child ended without an answer. `killed`: from outside, so the same compile may well succeed again."""

    def __init__(self, status: int, log: str) -> None:
        super().__init__(status, log)
        self.status = status
        self.log = log

    @property
    def killed(self) -> bool:
        return self.status in (-9, -15)

    def as_error(self, where: str) -> CompileError:
        how = f"signal {-self.status}" if self.status < 0 else f"status {self.status}"
        return CompileError(
            where=where,
            found=f"the compiler ended with {how} and no answer",
            needed="a compiled kernel",
            remedy="See the log; `jitspark doctor` checks the toolchain.",
            log=self.log,
        )
