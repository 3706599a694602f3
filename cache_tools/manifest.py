"""A pack's manifest: every file with its size and digest, the root of a hash tree over them, and what they need.

It is a pack's first file, so that a reader knows each byte that may follow, and it is what a signature covers.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cache_tools.archive import MANIFEST, bad_pack, limit_of, unknown_file
from jitspark.cache.record import Record
from jitspark.errors import PackError
from jitspark.key import Key, canonical

VERSION = 1
MAX_FILES = 200_000
MAX_TOTAL_BYTES = 8 * 1024**3
# How often a manifest of so many files can have these; of more, JSON would make twenty times its bytes.
_MAX_COUNTS = {b"[": 16, b"{": MAX_FILES + 16, b",": 4 * MAX_FILES}

_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,256}\Z")


@dataclass(frozen=True, slots=True, order=True)
class ListedFile:
    """One file below a cache root."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Needs:
    """What entries ask of the machine that loads them: each sorted, each once.

    `runtimes` are CUDA flavours of the runtime library; `symbols` what the process must offer.
    """

    hosts: tuple[str, ...]
    targets: tuple[str, ...]
    runtimes: tuple[str, ...]
    symbols: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a pack holds. `merkle_root` follows from `files`."""

    version: int
    files: tuple[ListedFile, ...]
    needs: Needs
    merkle_root: str

    def to_bytes(self) -> bytes:
        return canonical(self) + b"\n"


def needs_of(entries: Iterable[tuple[Key, Record]]) -> Needs:
    """What these entries need, together."""
    found = list(entries)
    return Needs(
        hosts=tuple(sorted({key.host for key, _ in found})),
        targets=tuple(sorted({key.target for key, _ in found})),
        runtimes=tuple(sorted({record.runtime for _, record in found})),
        symbols=tuple(sorted({symbol for _, record in found for symbol in record.needs})),
    )


def manifest_of(files: Iterable[ListedFile], needs: Needs) -> Manifest:
    listed = tuple(sorted(files))
    return Manifest(VERSION, listed, needs, merkle_root(listed))


def merkle_root(files: Sequence[ListedFile]) -> str:
    """The root of the hash tree over `files`, in the form of RFC 6962: leaves and nodes cannot be taken for another."""
    return _subtree([_leaf(each) for each in files]).hex()


def _leaf(file: ListedFile) -> bytes:
    return hashlib.sha256(b"\0" + f"{file.path}\0{file.size}\0{file.sha256}".encode()).digest()


def _subtree(leaves: Sequence[bytes]) -> bytes:
    if len(leaves) < 2:
        return leaves[0] if leaves else hashlib.sha256().digest()
    split = 1 << (len(leaves) - 1).bit_length() - 1
    return hashlib.sha256(b"\1" + _subtree(leaves[:split]) + _subtree(leaves[split:])).digest()


def manifest_from_bytes(content: bytes, where: str) -> Manifest:
    """The manifest in `content`: canonical, its files sorted and allowed, its root theirs. Raises PackError."""
    where = f"{where}: {MANIFEST}"
    if not content.isascii() or any(content.count(mark) > most for mark, most in _MAX_COUNTS.items()):
        raise bad_pack(where, "more than a manifest can hold", f"a manifest of version {VERSION}, of {MAX_FILES} files")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise bad_pack(where, "a manifest that is no JSON", f"a manifest of version {VERSION}") from None
    _check_version(value, where)
    manifest = _manifest(value, where)
    _check_files(manifest.files, where)
    if manifest.merkle_root != merkle_root(manifest.files):
        raise bad_pack(where, "a root that is not its files'", "an unchanged manifest")
    if content != manifest.to_bytes():
        raise bad_pack(where, "a manifest that is written in another way", "an unchanged manifest")
    return manifest


def _check_version(value: Any, where: str) -> None:
    version = value.get("version") if isinstance(value, dict) else None
    if type(version) is int and version > VERSION:
        raise PackError(
            where=where,
            found=f"a pack of version {version}",
            needed=f"version {VERSION}, the newest that this jitspark reads",
            remedy="Update jitspark, or make the pack again with this version.",
        )
    if version != VERSION or type(version) is not int:
        raise bad_pack(where, "a manifest of no known version", f"a manifest of version {VERSION}")


def _manifest(value: dict[str, Any], where: str) -> Manifest:
    try:
        files = tuple(ListedFile(**each) for each in value["files"])
        needs = Needs(**{name: _words(item) for name, item in value["needs"].items()})
        manifest = Manifest(**{**value, "files": files, "needs": needs})
        good = all(_is_listed_file(file) for file in files) and _DIGEST.match(manifest.merkle_root)
    except (TypeError, KeyError, AttributeError, ValueError):
        good = None
    if not good:
        raise bad_pack(where, "a manifest with other fields", f"a manifest of version {VERSION}")
    return manifest


def _is_listed_file(file: ListedFile) -> bool:
    """Whether what JSON gave has the types that were declared."""
    path: object = file.path
    return isinstance(path, str) and type(file.size) is int and file.size >= 0 and bool(_DIGEST.match(file.sha256))


def _words(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) and _WORD.match(each) for each in value):
        raise ValueError("no list of words")
    return tuple(value)


def _check_files(files: Sequence[ListedFile], where: str) -> None:
    if len(files) > MAX_FILES or sum(file.size for file in files) > MAX_TOTAL_BYTES:
        raise bad_pack(where, f"{len(files)} files", f"at most {MAX_FILES} files and {MAX_TOTAL_BYTES} bytes")
    last = ""
    for file in files:
        limit = limit_of(file.path)
        if limit is None or "/" not in file.path:
            raise unknown_file(file.path, where)
        if file.size > limit:
            raise bad_pack(f"{where}: {file.path}", f"{file.size} bytes", f"at most {limit} bytes")
        if file.path <= last:
            raise bad_pack(f"{where}: {file.path}", f"a file after {last}", "files in sorted order, each once")
        last = file.path
