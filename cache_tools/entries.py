"""Entries as people see them: which there are, which one a short name means, and where each came from."""

import contextlib
import logging
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from jitspark.cache.record import Record
from jitspark.cache.store import ARTIFACTS, Entry, Layer, keys_in, read_entry, toolchains_of
from jitspark.errors import EntryError, UsageError
from jitspark.key import Key

logger = logging.getLogger("jitspark")

_COMPILER = "nvidia-cutlass-dsl"


def entries_in(layers: Sequence[Layer], kernels: Container[str] | None = None) -> Iterator[Entry]:
    """Every entry (of these kernels, or all) whose record is good, layer by layer, sorted within each.

    A bad record is said and passed over.
    """
    for layer in layers:
        for key, toolchain in keys_in(layer):
            if kernels is not None and key.kernel not in kernels:
                continue
            try:
                entry = read_entry(layer, key, toolchain)
            except EntryError as problem:
                logger.warning("Bad cache entry %s: %s.", problem.where, problem.found)
                continue
            if entry is not None:
                yield entry


def entries_of(key: Key, layers: Sequence[Layer]) -> list[Entry]:
    """The entries of one key with a good record, whoever compiled them; their artifacts are not looked at."""
    found: list[Entry] = []
    for layer in layers:
        for toolchain in toolchains_of(layer, key):
            with contextlib.suppress(EntryError):
                if (entry := read_entry(layer, key, toolchain)) is not None:
                    found.append(entry)
    return found


def entries_named(name: str, layers: Sequence[Layer]) -> list[Entry]:
    """The entries of the one key that `name` means: the start of its digest, `kernel/<start>`, or an entry's path.

    Raises UsageError when it means none or several.
    """
    start, kernel = _digest_start(name)
    found = [e for e in entries_in(layers) if e.key.recipe.startswith(start) and kernel in (None, e.key.kernel)]
    keys = sorted({entry.key for entry in found})
    if len(keys) != 1 or not start:
        raise UsageError(
            where="KEY",
            found=f"{name!r}, which means {_some(keys) if start else 'no digest'}",
            needed="the start of one key's digest, or an entry's path",
            remedy="`jitspark ls --entries` lists the keys.",
        )
    return found


def is_key(name: str) -> bool:
    """Whether `name` is meant as a key rather than a kernel."""
    return "/" in name or _hexadecimal(name)


def _digest_start(name: str) -> tuple[str, str | None]:
    """The recipe digest's start, and the kernel where the name holds one."""
    parts = Path(name).parts
    if ARTIFACTS in parts:
        below = parts[parts.index(ARTIFACTS) + 1 :]
        return (below[2], below[1]) if len(below) >= 3 else ("", None)
    start, kernel = (parts[-1], parts[-2] if len(parts) > 1 else None) if parts else ("", None)
    return (start if _hexadecimal(start) else ""), kernel


def _hexadecimal(text: str) -> bool:
    return bool(text) and all(c in "0123456789abcdef" for c in text)


def _some(keys: Sequence[Key]) -> str:
    if not keys:
        return "no entry"
    return f"{len(keys)} keys: {', '.join(map(str, keys[:5]))}{', ...' if len(keys) > 5 else ''}"


def compiler_version(record: Record) -> str:
    """The compiler's version as the record tells it, for people."""
    distributions: Any = record.toolchain.get("distributions")
    found = [d for d in distributions if isinstance(d, dict)] if isinstance(distributions, list) else []
    return next((str(d.get("version"))[:40] for d in found if d.get("name") == _COMPILER), "unknown")
