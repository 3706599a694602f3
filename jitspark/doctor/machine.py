"""What `doctor` checks of this machine: interpreter, compiler, libraries, GPU, and memory to map code from."""

import contextlib
import ctypes
import mmap
import os
import sys

from jitspark import toolchain
from jitspark.cache.memory_file import sealed_memory_file
from jitspark.cache.runtime_library import find_runtime_library, load_runtime_library, offers
from jitspark.doctor.check import FailedError
from jitspark.gpus import find_gpus
from jitspark.settings import Settings
from jitspark.target import CUDA_FLAVOUR

MINIMUM_PYTHON = (3, 11)
# From each place that artifacts take symbols from: the ABI library, and the runtime library's own and CUDA's names.
NEEDED_SYMBOLS = (
    "TVMFFIEnvGetStream",
    "TVMFFIErrorSetRaisedFromCStr",
    "CuteDSLRT_TVMFFISetRaisedCudaError",
    "cuda_dialect_init_library_once",
    "_cudaLibraryLoadData",
    "_cudaLaunchKernelEx",
)


def python(_: Settings) -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    if tuple(sys.version_info) < MINIMUM_PYTHON:
        raise FailedError(version, f"Use Python {'.'.join(map(str, MINIMUM_PYTHON))} or newer.")
    return f"{version}, {sys.executable}"


def compiler(settings: Settings) -> str:
    found = toolchain.distributions()
    missing = [name for name, version in found.items() if version is None]
    if missing:
        text = f"no {', '.join(missing)}"
        raise FailedError(text, "Install jitspark[compile].", needed=settings.compile != "never")
    return ", ".join(f"{name} {version}" for name, version in found.items())


def cuda_flavour(settings: Settings) -> str:
    path = toolchain.extension_module()
    if path is None or not path.is_file():
        text = f"no {CUDA_FLAVOUR} compiler for Python {sys.version_info.major}.{sys.version_info.minor}"
        raise FailedError(text, "Install jitspark[compile] for this Python.", needed=settings.compile != "never")
    return f"{CUDA_FLAVOUR}, {path.name}"


def linker(settings: Settings) -> str:
    version = toolchain.linker_version()
    if version is None:
        raise FailedError("no working `ld` on PATH", "Install binutils.", needed=settings.compile != "never")
    return version


def runtime_library(settings: Settings) -> str:
    library = find_runtime_library(settings)
    load_runtime_library(library)
    return f"{library.path}, {library.path.stat().st_size} bytes, mapped"


def symbols(settings: Settings) -> str:
    load_runtime_library(find_runtime_library(settings))
    import tvm_ffi

    missing = [symbol for symbol in NEEDED_SYMBOLS if not offers(symbol)]
    if missing:
        raise FailedError(
            f"no {', '.join(missing)}", "Install the apache-tvm-ffi and runtime library that jitspark asks for."
        )
    return f"all that kernels need, apache-tvm-ffi {tvm_ffi.__version__}"


def driver(_: Settings) -> str:
    machine = find_gpus()
    if machine.driver is None:
        raise FailedError("no NVIDIA driver: kernels can be compiled and loaded here, not launched", "", needed=False)
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


def memory_files(_: Settings) -> str:
    descriptor = sealed_memory_file("jitspark-doctor", bytes(mmap.PAGESIZE))
    try:
        mmap.mmap(descriptor, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
    except OSError as problem:
        found = f"not to be mapped as code ({problem.strerror})"
        raise FailedError(found, "Allow executable memory files (vm.memfd_noexec, SELinux).") from None
    else:
        with contextlib.suppress(PermissionError):
            os.pwrite(descriptor, b"x", 0)
            raise FailedError("still to be written to when sealed", "Use a kernel whose memory files can be sealed.")
    finally:
        os.close(descriptor)
    return "can be sealed and mapped as code"
