"""`verify --trust`: every entry of a cache against the signed manifests that its root keeps (packs-v1/)."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cache_tools.archive import MAX_MANIFEST_BYTES, MAX_SIGNATURE_BYTES, RUNTIME_LIBRARY
from cache_tools.contents import PACKS
from cache_tools.manifest import manifest_from_bytes
from cache_tools.pins import MAX_PLAN_BYTES, plan_names
from cache_tools.signing import Trust, check_trust
from cache_tools.verify import Bad
from jitspark.cache.folders import place, read_below
from jitspark.cache.record import MAX_ARTIFACT_BYTES, MAX_RECORD_BYTES
from jitspark.cache.runtime_library import RUNTIME
from jitspark.cache.store import ARTIFACT, PLANS, RECORD, Layer, entry_parts, keys_in
from jitspark.errors import EntryError, PackError

logger = logging.getLogger("jitspark")

_MAX_LIBRARY_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file in a root that a manifest must cover, and how large it may be."""

    parts: tuple[str, ...]
    limit: int


def unsigned_files(layers: Sequence[Layer], trust: Trust) -> Iterator[Bad]:
    """Each file of an entry, a plan or a runtime library that no trusted key vouches for, as it stands now.

    A manifest of an untrusted key, or one that has been changed, vouches for nothing and is said.
    """
    for layer in layers:
        digests = _trusted_digests(layer, trust)
        for kept in _kept_files(layer):
            wanted, where = digests.get("/".join(kept.parts)), place(layer.root, kept.parts)
            if wanted is None:
                yield Bad(where, "in no manifest that a trusted key signed")
            elif _digest(layer, kept) != wanted:
                yield Bad(where, "other bytes than were signed")


def _kept_files(layer: Layer) -> Iterator[_Kept]:
    for key, toolchain in keys_in(layer):
        parts = entry_parts(key, toolchain)
        yield _Kept((*parts, ARTIFACT), MAX_ARTIFACT_BYTES)
        yield _Kept((*parts, RECORD), MAX_RECORD_BYTES)
    for name in plan_names(layer.root):
        yield _Kept((PLANS, name), MAX_PLAN_BYTES)
    for flavour in _names(layer.root / RUNTIME):
        yield _Kept((RUNTIME, flavour, RUNTIME_LIBRARY), _MAX_LIBRARY_BYTES)


def _trusted_digests(layer: Layer, trust: Trust) -> dict[str, str]:
    """Digest by path, from every manifest of the root that a trusted key signed."""
    digests: dict[str, str] = {}
    for name in _names(layer.root / PACKS):
        stem, _, kind = name.rpartition(".")
        if kind == "json":
            where = str(layer.root / PACKS / name)
            try:
                content = _read(layer, (PACKS, name), MAX_MANIFEST_BYTES)
                signature = _read(layer, (PACKS, f"{stem}.sig"), MAX_SIGNATURE_BYTES)
                check_trust(trust, content, signature, where)
                digests.update({file.path: file.sha256 for file in manifest_from_bytes(content, where).files})
            except (PackError, EntryError, FileNotFoundError) as problem:
                logger.warning("%s vouches for nothing: %s", where, getattr(problem, "found", problem))
    return digests


def _digest(layer: Layer, kept: _Kept) -> str | None:
    with contextlib.suppress(EntryError, FileNotFoundError):
        return hashlib.sha256(_read(layer, kept.parts, kept.limit)).hexdigest()
    return None


def _read(layer: Layer, parts: tuple[str, ...], limit: int) -> bytes:
    return read_below(layer.root, parts, limit, trusted=layer.trusted)


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []
