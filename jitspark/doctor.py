"""`doctor`: one PASS, FAIL or NOTE for each thing that jitspark needs from this machine, each FAIL with what to do."""

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cache_tools.machine import gpu_targets
from cache_tools.manifest import Needs, needs_of
from cache_tools.roots import writable_layer
from jitspark import toolchain
from jitspark.errors import CacheDirectoryError, JitsparkError
from jitspark.folders import root_problem
from jitspark.gpus import find_gpus
from jitspark.lock import LockDirectory, keys_folder
from jitspark.memory_file import sealed_memory_file
from jitspark.runtime_library import find_runtime_library, load_runtime_library, offers
from jitspark.settings import Settings
from jitspark.staging import staging
from jitspark.target import CUDA_FLAVOUR, host_name

Status = Literal["PASS", "FAIL", "NOTE"]

MINIMUM_PYTHON = (3, 11)
NEEDED_BYTES = 256 * 1024 * 1024
# From each place that artifacts take symbols from: the ABI library, and the runtime library's own and CUDA's names.
NEEDED_SYMBOLS = (
    "TVMFFIEnvGetStream",
    "TVMFFIErrorSetRaisedFromCStr",
    "CuteDSLRT_TVMFFISetRaisedCudaError",
    "cuda_dialect_init_library_once",
    "_cudaLibraryLoadData",
    "_cudaLaunchKernelEx",
)


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, how it is, and for a FAIL what to do. A NOTE is nothing that stops jitspark here."""

    part: str
    status: Status
    text: str
    remedy: str = ""


def checks(settings: Settings, pack: Path | None = None) -> list[Check]:
    """Every check, in the order of the parts that depend on each other; with `pack`, also whether it could run here."""
    found = [_run(part, check, settings) for part, check in _CHECKS.items()]
    return found if pack is None else [*found, _run(f"pack {pack.name}", lambda known: _pack(pack, known), settings)]


def checks_lines(found: Sequence[Check]) -> Iterator[str]:
    for check in found:
        yield f"{check.status}  {check.part}: {check.text}"
        if check.remedy:
            yield f"      {check.remedy}"
    failed = sum(check.status == "FAIL" for check in found)
    yield f"{len(found)} checks, {failed} failed"


def checks_json(found: Sequence[Check]) -> dict[str, Any]:
    return {"checks": [asdict(check) for check in found], "failed": sum(check.status == "FAIL" for check in found)}


class _FailedError(Exception):
    """What was found instead, and what to do. `needed` is False for what this process can do without."""

    def __init__(self, found: str, remedy: str, *, needed: bool = True) -> None:
        super().__init__(found, remedy)
        self.found = found
        self.remedy = remedy
        self.needed = needed


def _run(part: str, check: Callable[[Settings], str], settings: Settings) -> Check:
    try:
        return Check(part, "PASS", check(settings))
    except _FailedError as failed:
        return Check(part, "FAIL" if failed.needed else "NOTE", failed.found, failed.remedy)
    except JitsparkError as error:
        return Check(part, "FAIL", f"{error.where}: found {error.found}", error.remedy)
    except OSError as problem:
        return Check(part, "FAIL", str(problem), "Mend what the system says.")


def _python(_: Settings) -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if tuple(sys.version_info) < MINIMUM_PYTHON:
        raise _FailedError(version, f"Use Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer.")
    return f"{version}, {sys.executable}"


def _compiler(settings: Settings) -> str:
    found = toolchain.distributions()
    missing = [name for name, version in found.items() if version is None]
    if missing:
        text = f"no {', '.join(missing)}"
        raise _FailedError(text, "Install jitspark[compile].", needed=settings.compile != "never")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def _cuda_flavour(settings: Settings) -> str:
    path = toolchain.extension_module()
    if path is None or not path.is_file():
        text = f"no {CUDA_FLAVOUR} compiler for Python {sys.version_info.major}.{sys.version_info.minor}"
        raise _FailedError(text, "Install jitspark[compile] for this Python.", needed=settings.compile != "never")
    return f"{CUDA_FLAVOUR}, {path.name}"


def _linker(settings: Settings) -> str:
    version = toolchain.linker_version()
    if version is None:
        raise _FailedError("no working `ld` on PATH", "Install binutils.", needed=settings.compile != "never")
    return version


def _runtime_library(settings: Settings) -> str:
    library = find_runtime_library(settings)
    load_runtime_library(library)
    return f"{library.path}, {library.path.stat().st_size} bytes, mapped"


def _symbols(settings: Settings) -> str:
    load_runtime_library(find_runtime_library(settings))
    import tvm_ffi

    missing = [symbol for symbol in NEEDED_SYMBOLS if not offers(symbol)]
    if missing:
        raise _FailedError(
            f"no {', '.join(missing)}", "Install the apache-tvm-ffi and runtime library that jitspark asks for."
        )
    return f"all that kernels need, apache-tvm-ffi {tvm_ffi.__version__}"


def _cached_entries(settings: Settings) -> str:
    """What the entries of the roots need, and whether this process offers it."""
    from cache_tools.entries import entries_in
    from cache_tools.roots import readable_layers

    entries = [(entry.key, entry.record) for entry in entries_in(readable_layers(settings))]
    return f"{len(entries)} entries{_offered(needs_of(entries), settings)}" if entries else "none"


def _pack(pack: Path, settings: Settings) -> str:
    from cache_tools.opened import opened_pack
    from cache_tools.signing import ANY
    from cache_tools.unpack import PackedEntry, packed_items

    with opened_pack(pack, ANY) as opened:
        items = packed_items(opened, str(pack))
        found = [(item.key, item.record) for item in items if isinstance(item, PackedEntry)]
    needs = needs_of(found)
    signed = "signed, not checked here" if opened.signature else "not signed"
    return f"{len(found)} entries{_offered(needs, settings)}; {signed}"


def _offered(needs: Needs, settings: Settings) -> str:
    """What is needed, as text. Raises _FailedError where it is not here: other hosts' entries alone, or a symbol."""
    told = f" for {', '.join(needs.hosts)} and {', '.join(needs.targets)}"
    if host_name() not in needs.hosts:
        raise _FailedError(f"entries{told}, and this is {host_name()}", "Use a cache that was built for this host.")
    lacking = [flavour for flavour in needs.runtimes if flavour != CUDA_FLAVOUR]
    if lacking:
        raise _FailedError(f"entries for the runtime library {', '.join(lacking)}", f"Build them for {CUDA_FLAVOUR}.")
    load_runtime_library(find_runtime_library(settings))
    missing = [symbol for symbol in needs.symbols if not offers(symbol)]
    if missing:
        text = f"entries{told} need symbols that nothing here offers: {', '.join(missing[:5])}"
        raise _FailedError(text, "Install the apache-tvm-ffi and runtime library that they were built against.")
    return f"{told}; {len(needs.symbols)} symbols, all offered here{_gpu_note(needs)}"


def _gpu_note(needs: Needs) -> str:
    here = gpu_targets()
    fitting = ", ".join(sorted(set(here or ()) & set(needs.targets))) or "none of them"
    return "; no GPU to launch on" if here is None else f"; the GPUs here run {fitting}"


def _driver(_: Settings) -> str:
    machine = find_gpus()
    if machine.driver is None:
        raise _FailedError("no NVIDIA driver: kernels can be compiled and loaded here, not launched", "", needed=False)
    gpus = ", ".join(f"{gpu.name} ({gpu.target or 'no kernel supports it'})" for gpu in machine.gpus) or "no GPU"
    return f"{machine.driver}, CUDA {_cuda_version()}, {gpus}"


def _cuda_version() -> str:
    """What libcuda says it supports."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return "unknown (no libcuda.so.1)"
    return f"{version.value // 1000}.{version.value % 1000 // 10}" if status == 0 else f"unknown (error {status})"


def _read_only_roots(settings: Settings) -> str:
    problems = {root: root_problem(root, settings.trust_writable_roots) for root in settings.cache_path}
    bad = [f"{root}: {problem}" for root, problem in problems.items() if problem is not None]
    if bad:
        raise _FailedError("; ".join(bad), "Mend JITSPARK_CACHE_PATH, or the owner and mode of these roots.")
    return ", ".join(map(str, settings.cache_path)) or "none"


def _cache_root(settings: Settings) -> str:
    state = _root(settings).stat()
    return f"{settings.cache_dir}, owner {state.st_uid}, mode {state.st_mode & 0o7777:04o}, can be written to"


def _root(settings: Settings) -> Path:
    """The writable root. Without one it is a failure, unless compiling is forbidden: then nothing need be written."""
    try:
        return writable_layer(settings).root
    except CacheDirectoryError as error:
        text = f"{error.where}: found {error.found}"
        raise _FailedError(text, error.remedy, needed=settings.compile != "never") from None


def _memory_files(_: Settings) -> str:
    descriptor = sealed_memory_file("jitspark-doctor", bytes(mmap.PAGESIZE))
    try:
        mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as problem:
        found = f"not to be mapped as code ({problem.strerror})"
        raise _FailedError(found, "Allow executable memory files (vm.memfd_noexec, SELinux).") from None
    else:
        with contextlib.suppress(PermissionError):
            os.pwrite(descriptor, b"x", 0)
            raise _FailedError("still to be written to when sealed", "Use a kernel whose memory files can be sealed.")
    finally:
        os.close(descriptor)
    return "can be sealed and mapped as code"


def _free_space(settings: Settings) -> str:
    space = os.statvfs(_root(settings))
    free = space.f_bavail * space.f_frsize
    if free < NEEDED_BYTES:
        raise _FailedError(f"{free} bytes", f"Free some: a deployment's kernels need up to {NEEDED_BYTES} bytes.")
    return f"{free // 2**20} MiB"


def _locks(settings: Settings) -> str:
    """Two lockers of one key exclude each other, and the second gets it when the first lets go."""
    keys = keys_folder(settings.lock_dir, Path("/jitspark-doctor"))
    locks = LockDirectory(settings.lock_dir, keys, settings.compile_slots)
    first, second = locks.key(f"doctor-{os.getpid()}"), locks.key(f"doctor-{os.getpid()}")
    try:
        taken = first.try_acquire("doctor")
        both = second.try_acquire("doctor")
        first.release()
        after = both or second.try_acquire("doctor")
    finally:
        first.release()
        second.release()
    if not taken or both or not after:
        raise _FailedError(
            f"{settings.lock_dir}: locks do not exclude", "Set XDG_RUNTIME_DIR to a directory in local memory."
        )
    return f"{settings.lock_dir}, {settings.compile_slots} compile slots"


def _rename(settings: Settings) -> str:
    """A folder moves in one step, and never onto one that holds something."""
    with staging(_root(settings)) as folder:
        for name in ("first", "second"):
            (folder / name).mkdir()
            (folder / name / "file").write_text(name)
        os.rename(folder / "first", folder / "final")
        try:
            os.rename(folder / "second", folder / "final")
        except OSError:
            return "folders are renamed in one step, never over one another"
    raise _FailedError(
        "a folder was renamed over another", "Set JITSPARK_CACHE_DIR to a directory on another file system."
    )


_CHECKS: dict[str, Callable[[Settings], str]] = {
    "Python": _python,
    "compiler": _compiler,
    "CUDA flavour": _cuda_flavour,
    "linker": _linker,
    "runtime library": _runtime_library,
    "symbols": _symbols,
    "driver": _driver,
    "read-only roots": _read_only_roots,
    "cache root": _cache_root,
    "cached entries": _cached_entries,
    "memory files": _memory_files,
    "free space": _free_space,
    "locks": _locks,
    "rename": _rename,
}
