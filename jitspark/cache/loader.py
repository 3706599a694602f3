"""Loading artifacts into this process: verified bytes, mapped from sealed memory, never from a path.

Imports the standard library, apache-tvm-ffi and light modules of our own; never the compiler. Mapping a file by its
path has two traps that this module exists for: the dynamic loader compares path *text* first, so a reused
descriptor's name returns the library loaded before; and a file changes under a mapping. So: read, check the digest,
copy into a sealed memory file, map that under a spelling that no other content ever has, then check that each symbol
lies in its own memory file's mapping.
"""

import ctypes
import functools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitspark.cache.memory_file import sealed_memory_file
from jitspark.cache.record import check_library
from jitspark.cache.runtime_library import find_runtime_library, load_runtime_library, offers, without_collecting
from jitspark.cache.store import Entry
from jitspark.errors import EntryError, TargetError
from jitspark.settings import Settings
from jitspark.target import CUDA_FLAVOUR, host_name


@dataclass(frozen=True, slots=True)
class Kernel:
    """A loaded kernel. `function(*args)` launches on torch's current stream; `entry` says what it is."""

    entry: Entry
    function: Any
    address: int


class Loader:
    """Loads entries, each artifact once per process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # By symbol too: a forged record may name another kernel's artifact, which has not this kernel's symbol.
        self._loaded: dict[tuple[str, str], Kernel] = {}

    def load(self, entries: Sequence[Entry], target: str | None = None) -> list[Kernel]:
        """The kernels of `entries`, in order.

        `target` is what the device that will run them needs; without it, entries for any target are loaded.
        Raises TargetError for an entry for another target, EntryError for one that is damaged, for another host, or
        needs symbols that this process does not offer (nothing of it is mapped then), ToolchainError when the runtime
        library is missing.
        """
        if target is not None:
            _check_targets(entries, target)
        fresh = {_identity(entry): entry for entry in entries if _identity(entry) not in self._loaded}
        if fresh:
            load_runtime_library(find_runtime_library(self._settings))
            with without_collecting():
                self._load(list(fresh.values()))
        return [replace(self._loaded[_identity(entry)], entry=entry) for entry in entries]

    def _load(self, entries: Sequence[Entry]) -> None:
        import tvm_ffi

        mapped = [(entry, _map(entry)) for entry in entries]
        _check_mappings(mapped)
        for entry, address in mapped:
            # No library to keep alive: what is mapped stays mapped for the life of the process.
            function = tvm_ffi.Function.__from_extern_c__(address)
            self._loaded[_identity(entry)] = Kernel(entry, function, address)


def _map(entry: Entry) -> int:
    """The address of the entry's kernel, in memory that is the entry's alone."""
    check_usable(entry)
    address = map_artifact(entry.read_artifact(), entry.record.sha256, entry.record.symbol)
    if address is None:
        raise _unusable(entry, f"no symbol {entry.record.symbol}", "an artifact that exports its kernel")
    return address


def _identity(entry: Entry) -> tuple[str, str]:
    return entry.record.sha256, entry.record.symbol


def _check_targets(entries: Sequence[Entry], target: str) -> None:
    """Refuse here what a launch would refuse as cudaErrorNoKernelImageForDevice."""
    for entry in entries:
        if entry.key.target != target:
            raise TargetError(
                where=f"{entry.key} in {entry.where}",
                found=f"an entry for {entry.key.target}",
                needed=f"one for {target}, which the device runs",
                remedy=f"Build it with `jitspark warm --target {target}`.",
            )


def check_usable(entry: Entry) -> None:
    """Raise EntryError unless this process can map `entry`: its host, and the symbols that it needs."""
    if entry.key.host != host_name():
        raise _unusable(entry, f"an entry for host {entry.key.host}", f"one for {host_name()}")
    if entry.record.runtime != CUDA_FLAVOUR:
        raise _unusable(entry, f"an entry for the {entry.record.runtime} runtime library", f"one for {CUDA_FLAVOUR}")
    missing = [symbol for symbol in entry.record.needs if not offers(symbol)]
    if missing:
        raise _unusable(entry, f"a runtime without {', '.join(missing[:5])}", "the runtime ABI it was built for")


def map_artifact(content: bytes, sha256: str, symbol: str) -> int | None:
    """Map `content` from a sealed memory file, for good; the address of `symbol` in it, None when it has none.

    No descriptor stays open. Works on mounts that forbid execution. Raises EntryError for what is no whole library.
    """
    check_library(content, f"artifact {sha256[:12]}")
    try:
        descriptor = sealed_memory_file(_memory_name(sha256), content)
        try:
            return _find_symbol(spelling(sha256, descriptor), symbol)
        finally:
            os.close(descriptor)
    except OSError as problem:
        raise EntryError(
            where=f"artifact {sha256[:12]}",
            found=str(problem),
            needed="a library that this system can map",
            remedy="Rebuild the entry on this host with `jitspark warm`.",
        ) from None


@functools.cache
def _dynamic_loader() -> ctypes.CDLL:
    """The dynamic loader's own functions: `ctypes.CDLL` makes a class for each library, at half the cost of mapping."""
    functions = ctypes.CDLL(None)
    functions.dlopen.argtypes, functions.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
    functions.dlsym.argtypes, functions.dlsym.restype = (ctypes.c_void_p, ctypes.c_char_p), ctypes.c_void_p
    functions.dlerror.argtypes, functions.dlerror.restype = (), ctypes.c_char_p
    return functions


def _find_symbol(path: str, symbol: str) -> int | None:
    loader = _dynamic_loader()
    library = loader.dlopen(path.encode(), os.RTLD_NOW | os.RTLD_LOCAL)
    if library is None:
        raise OSError((loader.dlerror() or b"no reason given").decode(errors="replace"))
    address: int | None = loader.dlsym(library, symbol.encode())
    return address


def spelling(sha256: str, descriptor: int) -> str:
    """A path to the descriptor whose text holds 64 bits of the digest, as "/" or "/." between its components."""
    bits = f"{int(sha256[:16], 16):064b}".replace("0", "/").replace("1", "/.")
    return f"/proc/self{bits}/fd/{descriptor}"


def _memory_name(sha256: str) -> str:
    return f"jitspark-{sha256}"


def _check_mappings(mapped: Iterable[tuple[Entry, int]]) -> None:
    """Each symbol lies in the mapping of its own memory file, or the dynamic loader gave us another kernel."""
    ranges = _memory_ranges()
    for entry, address in mapped:
        inside = ranges.get(_memory_name(entry.record.sha256), ())
        if not any(start <= address < end for start, end in inside):
            raise _unusable(entry, "a symbol outside its own mapping", "the kernel that the record describes")


def _memory_ranges() -> dict[str, list[tuple[int, int]]]:
    ranges: dict[str, list[tuple[int, int]]] = {}
    with open("/proc/self/maps", "rb") as maps:
        for line in maps.read().splitlines():
            before, mark, name = line.partition(b"/memfd:")
            if mark:
                start, end = before.split(b" ", 1)[0].split(b"-")
                ranges.setdefault(name.split(b" ", 1)[0].decode(), []).append((int(start, 16), int(end, 16)))
    return ranges


def _unusable(entry: Entry, found: str, needed: str) -> EntryError:
    return EntryError(
        where=f"{entry.key} in {entry.where}",
        found=found,
        needed=needed,
        remedy="Build it for this machine with `jitspark warm`.",
    )
