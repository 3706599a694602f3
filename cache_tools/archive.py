"""A pack's inside: a tar file in which every byte that is not content follows from the members' names and sizes.

Regular files only, in sorted order, with fixed times, owners and modes; any tar program can read it. A reader accepts
a header only if it is the very header that the writer would have written, so links, devices, duplicates, odd modes
and extension headers have no spelling.
"""

import re
import tarfile
from typing import IO, Protocol

from cache_tools.pins import MAX_PLAN_BYTES
from jitspark.cache.record import MAX_ARTIFACT_BYTES, MAX_RECORD_BYTES
from jitspark.cache.store import ARTIFACT, ARTIFACTS, RECORD
from jitspark.errors import PackError

BLOCK = tarfile.BLOCKSIZE
MANIFEST = "MANIFEST.json"
SIGNATURE = "MANIFEST.sig"
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
LICENCE = "LICENSE"
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_SIGNATURE_BYTES = 256
FILE_MODE = 0o444

_END = b"\0" * (2 * BLOCK)
_ENTRY = re.compile(
    rf"{ARTIFACTS}/[a-z0-9_]+-[a-z0-9_]+-[a-z0-9_]+/[a-z0-9_]+/[0-9a-f]{{64}}/[0-9a-f]{{64}}/(?P<file>[a-z.]+)\Z"
)
_RUNTIME = re.compile(r"runtime-v1/cu[0-9]{1,3}/(?P<file>LICENSE|libcute_dsl_runtime\.so(\.sha256)?)\Z")
_PLAN = re.compile(r"plans-v1/[0-9a-f]{64}\.(?P<file>json)\Z")
_TOP = re.compile(r"(?P<file>MANIFEST\.(json|sig))\Z")
_OTHER_LAYOUT = re.compile(r"(artifacts|plans|runtime)-v[0-9]{1,9}/")
_LIMITS = {
    MANIFEST: MAX_MANIFEST_BYTES,
    SIGNATURE: MAX_SIGNATURE_BYTES,
    ARTIFACT: MAX_ARTIFACT_BYTES,
    RECORD: MAX_RECORD_BYTES,
    RUNTIME_LIBRARY: 256 * 1024 * 1024,  # it has 43 MB
    f"{RUNTIME_LIBRARY}.sha256": 64,  # in packs that had no manifest
    LICENCE: 1024 * 1024,
    "json": MAX_PLAN_BYTES,
}
AS_WRITTEN = "a pack as `jitspark pack` writes it"


class Source(Protocol):
    """What a pack is read from: `read(size)` gives fewer bytes only at the end."""

    def read(self, size: int, /) -> bytes: ...


def write_member(stream: IO[bytes], name: str, content: bytes) -> None:
    """Append one file. Raises PackError for a name or size that no reader would take."""
    limit = limit_of(name)
    if limit is None or len(content) > limit:
        raise bad_pack(name[:200], f"{len(content)} bytes under this name", "a file of an entry, within its limit")
    stream.write(_header(name, len(content)))
    stream.write(content)
    stream.write(b"\0" * (-len(content) % BLOCK))


def write_end(stream: IO[bytes]) -> None:
    stream.write(_END)


class Members:
    """The members of a pack: `header()` for the next one's name and size, then `content()` for its bytes.

    Both raise PackError for the first thing that a writer does not write.
    """

    def __init__(self, source: Source, where: str) -> None:
        self._source = source
        self._where = where
        self._name = ""
        self._size = 0

    def header(self) -> tuple[str, int] | None:
        """The next member's name and size, checked before anything of it is read; None after the last."""
        block = self._exactly(BLOCK, self._where)
        if block == b"\0" * BLOCK:
            if any(self._exactly(BLOCK, self._where)) or self._source.read(1):
                raise bad_pack(self._where, "content after the end", AS_WRITTEN)
            return None
        name, size = _parse(block, self._where)
        if name <= self._name:
            raise bad_pack(
                f"{self._where}: {name}", f"a member after {self._name}", "members in sorted order, each once"
            )
        self._name, self._size = name, size
        return name, size

    def content(self) -> bytes:
        where = f"{self._where}: {self._name}"
        content = self._exactly(self._size, where)
        if any(self._exactly(-self._size % BLOCK, where)):
            raise bad_pack(where, "content where padding belongs", AS_WRITTEN)
        return content

    def _exactly(self, size: int, where: str) -> bytes:
        content = self._source.read(size)
        if len(content) != size:
            raise bad_pack(where, "the end of the file in the middle", "a whole pack")
        return content


def _parse(block: bytes, where: str) -> tuple[str, int]:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError, ValueError):
        raise bad_pack(where, "bytes that are no tar header", AS_WRITTEN) from None
    name = info.name
    limit = limit_of(name)
    if limit is None:
        raise unknown_file(name, where)
    if info.size > limit:
        raise bad_pack(f"{where}: {name}", f"{info.size} bytes", f"at most {limit} bytes")
    if info.size < 0 or block != _header(name, info.size):
        found = f"type {info.type!r}, mode {info.mode:o}, owner {info.uid}:{info.gid} or a time"
        raise bad_pack(f"{where}: {name}", found, "a regular file with fixed mode, owner and time")
    return name, info.size


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, FILE_MODE
    try:
        return info.tobuf(tarfile.USTAR_FORMAT)
    except ValueError:
        raise bad_pack(name[:200], "a name too long for a pack", "names of at most 255 bytes") from None


def limit_of(name: str) -> int | None:
    """How large the file of this name may be; None for a name that has no place in a pack."""
    member = _ENTRY.match(name) or _RUNTIME.match(name) or _PLAN.match(name) or _TOP.match(name)
    return _LIMITS.get(member["file"]) if member else None


def is_runtime(name: str) -> bool:
    """Whether a member of this (accepted) name belongs to a runtime library rather than to an entry."""
    return _RUNTIME.match(name) is not None


def is_plan(name: str) -> bool:
    """As `is_runtime`, for a stored plan."""
    return _PLAN.match(name) is not None


def unknown_file(name: str, where: str) -> PackError:
    if _OTHER_LAYOUT.match(name) and ".." not in name:
        return PackError(
            where=f"{where}: {name[:200]!r}",
            found="another version's layout",
            needed=f"files of entries below {ARTIFACTS}/, and plans",
            remedy="Unpack it with the jitspark that made it, or a newer one.",
        )
    return bad_pack(f"{where}: {name[:200]!r}", "an unknown file", f"files of entries below {ARTIFACTS}/ only")


def bad_pack(where: str, found: str, needed: str) -> PackError:
    return PackError(where=where, found=found, needed=needed, remedy="Make the pack again with `jitspark pack`.")
