"""`python -m jitspark.compiler PARENT_PID`: compile what standard input asks for, one request a line, until it ends.

Request and answer are one JSON object a line; an answer holds either what `Compiled` holds or the error. A crash is
an exit status. The process dies with its parent and never has two compiles under way: the DSL allows one.
"""

import ctypes
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from jitspark.errors import JitsparkError, SpecError
from jitspark.key import recipe_of
from jitspark.registry import load_spec
from jitspark.spec import Specialization

PR_SET_PDEATHSIG = 1


def main() -> int:
    die_with_parent(int(sys.argv[1]))
    answers = _take_standard_output()
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line))) + "\n")
        answers.flush()
    return 0


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent ends, and end now if it already has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _take_standard_output() -> TextIO:
    """The channel for answers. What the DSL prints goes to standard error instead."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    from jitspark.compiler.compile import compile_specialization

    try:
        specialization = load_spec(request["kernel"]).specialize(
            axes=request["axes"], dtypes=request["dtypes"], statics=request["statics"]
        )
        compiled = compile_specialization(specialization, request["target"], Path(request["directory"]))
        _check_recipe(specialization, request)
    except JitsparkError as error:
        return error.to_json()
    return asdict(compiled)


def _check_recipe(specialization: Specialization, request: Mapping[str, Any]) -> None:
    """Refuse bytes that came from other sources than the key says. Looked at after they were imported, not before."""
    if recipe_of(specialization, request["target"]).digest != request["recipe"]:
        raise SpecError(
            where=specialization.title(),
            found="a spec or sources that changed after its key was made",
            needed="files that stay as they are while kernels are compiled",
            remedy="Run the command again.",
        )


if __name__ == "__main__":
    sys.exit(main())
