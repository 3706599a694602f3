"""The CuTe DSL runtime library: found by package metadata, loaded once, asked for the symbols that entries need.

Finding it imports nothing of the compiler. It is known by its size and its wheel's RECORD; hashing 43 MB at each start
would cost more than loading every kernel.
"""

import contextlib
import ctypes
import functools
import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jitspark.cache.folders import is_fit
from jitspark.cache.memory_file import sealed_memory_file
from jitspark.errors import ToolchainError
from jitspark.settings import Settings
from jitspark.target import CUDA_FLAVOUR

LIBRARY = "libcute_dsl_runtime.so"
RUNTIME = "runtime-v1"


@dataclass(frozen=True, slots=True)
class RuntimeLibrary:
    """A runtime library file; `size` is what it must have, or None where nothing says."""

    path: Path
    flavour: str
    size: int | None


def find_runtime_library(settings: Settings) -> RuntimeLibrary:
    """The runtime library to use: the one that the settings name, else the installed one, else one in a cache root.

    Mapping it runs its code, so in a cache root it counts only if nobody else may have put it there.

    Raises ToolchainError when there is none, or when its size is not what its RECORD says.
    """
    return _first_present(_candidates(settings))


def installed_runtime_library() -> RuntimeLibrary:
    """The runtime library that came with the compiler. Raises ToolchainError when there is none."""
    return _first_present(_installed())


def _first_present(candidates: list[RuntimeLibrary]) -> RuntimeLibrary:
    found = next((candidate for candidate in candidates if candidate.path.is_file()), None)
    if found is None:
        raise ToolchainError(
            where="runtime library",
            found=f"no {LIBRARY}",
            needed=f"the {CUDA_FLAVOUR} runtime library of nvidia-cutlass-dsl",
            remedy=f"Install nvidia-cutlass-dsl-libs-{CUDA_FLAVOUR}, or name the file in JITSPARK_RUNTIME_LIBRARY.",
        )
    return _checked(found)


def _installed() -> list[RuntimeLibrary]:
    from jitspark.toolchain import runtime_library

    installed = runtime_library()
    return [] if installed is None else [RuntimeLibrary(installed[0], CUDA_FLAVOUR, installed[1])]


def _candidates(settings: Settings) -> list[RuntimeLibrary]:
    if settings.runtime_library is not None:
        return [RuntimeLibrary(settings.runtime_library, CUDA_FLAVOUR, None)]
    roots = [*settings.cache_path, *([settings.cache_dir] if settings.cache_dir else [])]
    folders = (RUNTIME, CUDA_FLAVOUR)
    fit = (root for root in roots if is_fit(root, folders, LIBRARY, trusted=settings.trust_writable_roots))
    return _installed() + [RuntimeLibrary(root.joinpath(*folders, LIBRARY), CUDA_FLAVOUR, None) for root in fit]


def _checked(library: RuntimeLibrary) -> RuntimeLibrary:
    size = library.path.stat().st_size
    if library.size not in (None, size):
        raise ToolchainError(
            where=str(library.path),
            found=f"{size} bytes",
            needed=f"{library.size} bytes, as its package's RECORD says",
            remedy=f"Reinstall nvidia-cutlass-dsl-libs-{library.flavour}.",
        )
    return library


@functools.cache
def load_runtime_library(library: RuntimeLibrary) -> ctypes.CDLL:
    """Map the library so that artifacts find its symbols. Raises ToolchainError when it cannot be mapped."""
    mode = os.RTLD_GLOBAL | os.RTLD_NOW
    try:
        if not _executable(library.path):
            return ctypes.CDLL(f"/proc/self/fd/{_in_memory(library.path)}", mode=mode)
        return ctypes.CDLL(str(library.path), mode=mode)
    except OSError as problem:
        raise ToolchainError(
            where=str(library.path),
            found=str(problem),
            needed="a library that this system can map",
            remedy=f"Reinstall nvidia-cutlass-dsl-libs-{library.flavour}, or mend JITSPARK_RUNTIME_LIBRARY.",
        ) from None


def _executable(path: Path) -> bool:
    """Whether the file system lets code be mapped: volumes from images do not, in Kubernetes."""
    return not os.statvfs(path).f_flag & os.ST_NOEXEC


def _in_memory(path: Path) -> int:
    """A descriptor of a copy in memory. It stays open, so that no other file ever bears its name in this process."""
    return sealed_memory_file(path.name, path.read_bytes())


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Importing and loading make objects that stay: searching them for garbage in between takes a tenth of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def offers(symbol: str) -> bool:
    """Whether this process offers `symbol` to artifacts: the runtime ABI, asked before anything is mapped."""
    return hasattr(_global_scope(), symbol)


@functools.cache
def _global_scope() -> ctypes.CDLL:
    with without_collecting():
        import tvm_ffi  # noqa: F401 - half of the runtime ABI is its library's, global once it is imported

    return ctypes.CDLL(None)
