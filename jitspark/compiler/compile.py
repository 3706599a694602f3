"""One specialization for one target: compiled, linked, inspected."""

import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from jitspark.cache.failures import clean_log
from jitspark.compiler import cute, link
from jitspark.errors import CompileError, JitsparkError
from jitspark.key import codegen_options
from jitspark.spec import Specialization

ARTIFACT = "kernel.so"


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the record needs to know about an artifact. `seconds` is for people only and enters no file."""

    signature: str
    needs: tuple[str, ...]
    seconds: float


def compile_specialization(specialization: Specialization, target: str, directory: Path) -> Compiled:
    """Write `directory/kernel.so`.

    Raises CompileError with the compiler's or the linker's log, ToolchainError when either is missing.
    """
    started = time.perf_counter()
    cute.import_dsl()
    object_file = directory / "kernel.o"
    artifact = directory / ARTIFACT
    try:
        cute.write_object(specialization, codegen_options(target), object_file)
    except JitsparkError:
        raise
    except Exception as problem:  # the DSL raises whatever a kernel's Python code raises
        raise _failed(specialization, problem) from problem
    link.link(specialization.name, object_file, artifact)
    signature = link.signature(artifact, specialization.name)
    needs = tuple(link.needed_symbols(artifact))
    return Compiled(signature, needs, time.perf_counter() - started)


def _raised_at(problem: Exception) -> str:
    """A further line with the innermost line of our own kernels, where the failure came from one."""
    frames = traceback.extract_tb(problem.__traceback__)
    names = [(frame, frame.filename.rpartition("/kernel_specs/")[2]) for frame in frames]
    ours = [(frame, name) for frame, name in names if name != frame.filename]
    return f"\nraised at kernel_specs/{ours[-1][1]}:{ours[-1][0].lineno}" if ours else ""


def _failed(specialization: Specialization, problem: Exception) -> CompileError:
    log = clean_log(f"{type(problem).__name__}: {problem}{_raised_at(problem)}")
    first = next((line.strip() for line in log.splitlines() if line.strip()), "no message")
    return CompileError(
        where=specialization.title(),
        found=first[:300],
        needed="a kernel that the CuTe DSL compiles",
        remedy=f"See the log, and kernel_specs/{specialization.name}/kernel.py.",
        log=log[-8000:],
    )
