"""What the command lines share: one text for an error, its exit code, and warnings on standard error."""

import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jitspark.errors import CompileError, JitsparkError

LOG_LINES = 12


def run(app: Callable[..., Any], arguments: list[str], name: str) -> None:
    """Call a typer `app` and exit. An error is one text and its exit code; `--traceback`, anywhere, shows the rest."""
    traceback = "--traceback" in arguments

    def tell(text: str) -> None:
        if traceback:
            sys.excepthook(*sys.exc_info())
        say(f"{name}: {text}")

    _log_to_standard_error()
    try:
        app(args=[each for each in arguments if each != "--traceback"], prog_name=name)
    except JitsparkError as error:
        tell(error_text(error))
        sys.exit(error.exit_code)
    except OSError as problem:
        tell(f"{problem.filename or 'system'}: {problem.strerror or problem}")
        sys.exit(JitsparkError.exit_code)


def error_text(error: JitsparkError) -> str:
    """The error's four parts, and the first lines of a compiler's log."""
    if not isinstance(error, CompileError) or not error.log.strip():
        return str(error)
    lines = error.log.strip().splitlines()
    if lines == [error.found]:
        return str(error)
    more = [f"... {len(lines) - LOG_LINES} more lines"] if len(lines) > LOG_LINES else []
    return "\n    ".join([str(error), *lines[:LOG_LINES], *more])


def say(text: str) -> None:
    """A line for people, on standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def answer(text: str) -> None:
    """A line of the result, on standard output."""
    sys.stdout.write(f"{text}\n")


def answer_json(value: Any) -> None:
    """The result as one line of JSON."""
    answer(json.dumps(value))
    sys.stdout.flush()


@contextmanager
def errors_as_json(wanted: bool) -> Iterator[None]:  # noqa: FBT001 - the value of --json
    """With --json an error, too, is an object on the last line of standard output, beside its text elsewhere."""
    try:
        yield
    except JitsparkError as error:
        if wanted:
            answer_json({**error.to_json(), "exit_code": error.exit_code})
        raise


class _StandardError(logging.Handler):
    """Looks standard error up at each message, so that a progress bar can redirect it."""

    def emit(self, record: logging.LogRecord) -> None:
        say(f"{record.name}: {record.getMessage()}")


def _log_to_standard_error() -> None:
    logger = logging.getLogger("jitspark")
    if not logger.handlers:
        logger.addHandler(_StandardError(logging.WARNING))
