"""What packed entries need of a machine, and whether this one has it."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from cache_tools.manifest import Needs
from jitspark.cache.runtime_library import LIBRARY, find_runtime_library
from jitspark.errors import JitsparkError, PackError, TargetError
from jitspark.settings import Settings
from jitspark.target import CUDA_FLAVOUR, host_name

# Where the driver shows itself: without it no library need be asked for GPUs.
_DRIVER = Path("/proc/driver/nvidia")


@dataclass(frozen=True, slots=True)
class Need:
    """One thing that a pack needs; `here` is None where this machine cannot tell."""

    what: str
    needed: str
    here: bool | None
    found: str

    def __str__(self) -> str:
        verdict = {True: "this machine has it", False: "this machine has it not", None: "not to be told here"}[
            self.here
        ]
        return f"needs {self.what} {self.needed}: {verdict} ({self.found})"


def needs_here(needs: Needs, settings: Settings) -> Iterator[Need]:
    """Each need and whether this machine meets it, without mapping a library: `jitspark doctor` asks for symbols."""
    yield Need("host", ", ".join(needs.hosts), host_name() in needs.hosts, host_name())
    targets = gpu_targets()
    here = None if targets is None else bool(set(targets) & set(needs.targets))
    yield Need("target", ", ".join(needs.targets), here, ", ".join(targets or ()) or "no GPU")
    yield _runtime_need(needs, settings)
    abi = find_spec("tvm_ffi") is not None
    found = "apache-tvm-ffi is installed; `jitspark doctor` asks it" if abi else "no apache-tvm-ffi"
    yield Need("runtime ABI", f"{len(needs.symbols)} symbols", None if abi else False, found)


def _runtime_need(needs: Needs, settings: Settings) -> Need:
    wanted = ", ".join(needs.runtimes)
    if CUDA_FLAVOUR not in needs.runtimes:
        return Need("runtime library", wanted, here=False, found=CUDA_FLAVOUR)
    path = _installed_library()
    try:
        path = path or find_runtime_library(settings).path
    except JitsparkError as error:
        return Need("runtime library", wanted, here=False, found=error.found)
    return Need("runtime library", wanted, here=True, found=str(path))


def _installed_library() -> Path | None:
    """Where its wheel puts it. To ask package metadata would take as long as all the rest of a command."""
    folders = (Path(place, "nvidia_cutlass_dsl", CUDA_FLAVOUR, "lib") for place in sys.path)
    return next((folder / LIBRARY for folder in folders if (folder / LIBRARY).is_file()), None)


def gpu_targets() -> tuple[str, ...] | None:
    """The targets of this machine's GPUs; None where there is no driver to ask, as where images are built."""
    if not os.path.exists(_DRIVER):
        return None
    from jitspark.gpus import find_gpus, targets_of

    gpus = find_gpus().gpus
    return targets_of(gpus) if gpus else None


def refuse_elsewhere(needs: Needs, where: str) -> None:
    """Raise unless entries of this kind can run here: PackError for another host, TargetError for other GPUs."""
    remedy = "Make a pack for this machine, or unpack it for another with --other-machine."
    if host_name() not in needs.hosts:
        raise PackError(
            where=where,
            found=f"entries for host {', '.join(needs.hosts)}",
            needed=f"entries for {host_name()}, which this machine is",
            remedy=remedy,
        )
    targets = gpu_targets()
    if targets is not None and not set(targets) & set(needs.targets):
        raise TargetError(
            where=where,
            found=f"entries for {', '.join(needs.targets)}",
            needed=f"entries for this machine's GPUs ({', '.join(targets) or 'which no kernel supports'})",
            remedy=remedy,
        )
