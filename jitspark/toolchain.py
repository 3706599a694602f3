"""The toolchain's fingerprint, and where its parts lie, from package metadata alone.

Nothing here imports the compiler. The fingerprint holds versions and content digests, never a path, so that two
virtual environments with the same packages agree. Loading needs only constants from here: what reads package metadata
or starts a process is imported where it is used.
"""

import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from jitspark.errors import ToolchainError
from jitspark.target import CUDA_FLAVOUR

_DISTRIBUTIONS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    f"nvidia-cutlass-dsl-libs-{CUDA_FLAVOUR}",
)

# Built once per Python version, yet they emit the same bytes: known by their distribution's version instead, so that
# builders on Python 3.11 and 3.12 fill one cache.
_PER_PYTHON = re.compile(r"\.cpython-\d+|/iket/|_cutlass_ir_version_|libcuda_dialect_runtime_static\.a$")


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed package: its version and a digest of what it put into site-packages."""

    name: str
    version: str
    content: str


@dataclass(frozen=True, slots=True)
class Toolchain:
    """What turns a recipe into bytes: the compiler's distributions, its CUDA flavour and the linker."""

    distributions: tuple[Distribution, ...]
    cuda_flavour: str
    linker: str


@functools.cache
def own_toolchain() -> Toolchain | None:
    """This process' toolchain, or None when it has no compiler or no linker."""
    found: list[Distribution] = []
    for name in _DISTRIBUTIONS:
        distribution = _fingerprint(name)
        if distribution is None:  # a process that only loads stops here, before it starts a linker
            return None
        found.append(distribution)
    linker = linker_version()
    return None if linker is None else Toolchain(tuple(found), CUDA_FLAVOUR, linker)


def distributions() -> dict[str, str | None]:
    """The compiler's distributions and their installed versions, None where one is missing."""
    prints = {name: _fingerprint(name) for name in _DISTRIBUTIONS}
    return {name: None if found is None else found.version for name, found in prints.items()}


def require_toolchain() -> Toolchain:
    """This process' toolchain. Raises ToolchainError that says which part is missing."""
    toolchain = own_toolchain()
    if toolchain is not None:
        return toolchain
    missing = [name for name in _DISTRIBUTIONS if _fingerprint(name) is None]
    if missing:
        raise ToolchainError(
            where="compiler",
            found=f"no {', '.join(missing)}",
            needed="the CuTe DSL, to compile what the cache lacks",
            remedy="Install jitspark[compile], or use a cache that holds every entry.",
        )
    raise ToolchainError(
        where="linker",
        found="no working `ld` on PATH",
        needed="GNU ld, to link what the cache lacks",
        remedy="Install binutils, or use a cache that holds every entry.",
    )


def _fingerprint(name: str) -> Distribution | None:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import distribution as find_distribution

    try:
        distribution = find_distribution(name)
    except PackageNotFoundError:
        return None
    return Distribution(name, distribution.version, content_digest(distribution.read_text("RECORD") or ""))


def content_digest(record: str) -> str:
    """A digest over a wheel RECORD's hashed lines inside the package.

    Leaves out scripts (`..`: they name the environment's path), the dist-info folder (it names the installer),
    lines without a hash (byte code), and files built per Python version.
    """
    lines = sorted(line for line in record.splitlines() if _counts(line))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _counts(line: str) -> bool:
    path, _, rest = line.partition(",")
    outside = path.startswith(("..", "/")) or ".dist-info/" in path
    return rest.startswith("sha256=") and not outside and _PER_PYTHON.search(path) is None


@functools.cache
def linker_version() -> str | None:
    """The first line of `ld --version`, or None without a linker."""
    import subprocess

    path = linker_path()
    if path is None:
        return None
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout else None


def linker_path() -> str | None:
    import shutil

    return shutil.which("ld")


def extension_module() -> Path | None:
    """The compiler's extension module for the pinned flavour and this Python."""
    return _file_of(f"nvidia-cutlass-dsl-libs-{CUDA_FLAVOUR}", re.compile(rf"_cutlass_ir\.{CUDA_FLAVOUR}\.[^/]*\.so$"))


def runtime_library() -> tuple[Path, int] | None:
    """The runtime library of the pinned flavour and the size that its RECORD promises; `stubs/` are no runtime."""
    from importlib.metadata import files

    name = f"nvidia-cutlass-dsl-libs-{CUDA_FLAVOUR}"
    wanted = re.compile(rf"{CUDA_FLAVOUR}/lib/libcute_dsl_runtime\.so$")
    path = _file_of(name, wanted)
    if path is None:
        return None
    return path, next(f.size or 0 for f in files(name) or () if wanted.search(str(f)))


def _file_of(name: str, wanted: re.Pattern[str]) -> Path | None:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import files as files_of

    try:
        files = files_of(name) or []
    except PackageNotFoundError:
        return None
    return next((Path(str(f.locate())) for f in files if wanted.search(str(f))), None)
