"""The pack format: a tar file in which every byte that is not content follows from the members' names and sizes.

Regular files only, in sorted order, with fixed times, owners and modes; any tar program can read it. A reader accepts
a header only if it is the very header that the writer would have written, so links, devices, duplicates, odd modes
and extension headers have no spelling.
"""

import re
import tarfile
from collections.abc import Iterator
from typing import IO

from jitspark.errors import PackError
from jitspark.record import MAX_ARTIFACT_BYTES, MAX_RECORD_BYTES
from jitspark.store import ARTIFACT, ARTIFACTS, RECORD

BLOCK = tarfile.BLOCKSIZE
_END = b"\0" * (2 * BLOCK)
_MODE = 0o444
_MEMBER = re.compile(
    rf"{ARTIFACTS}/[a-z0-9_]+-[a-z0-9_]+-[a-z0-9_]+/[a-z0-9_]+/[0-9a-f]{{64}}/[0-9a-f]{{64}}/(?P<file>[a-z.]+)\Z"
)
RUNTIME_LIBRARY = "libcute_dsl_runtime.so"
RUNTIME_MEMBER = re.compile(r"runtime-v1/cu[0-9]{1,3}/(?P<file>libcute_dsl_runtime\.so(\.sha256)?)\Z")
_LIMITS = {
    ARTIFACT: MAX_ARTIFACT_BYTES,
    RECORD: MAX_RECORD_BYTES,
    RUNTIME_LIBRARY: 256 * 1024 * 1024,  # it has 43 MB
    f"{RUNTIME_LIBRARY}.sha256": 64,
}


def write_member(stream: IO[bytes], name: str, content: bytes) -> None:
    """Append one file. Raises PackError for a name or size that no reader would take."""
    limit = _limit(name)
    if limit is None or len(content) > limit:
        raise _bad(name[:200], f"{len(content)} bytes under this name", "a file of an entry, within its limit")
    stream.write(_header(name, len(content)))
    stream.write(content)
    stream.write(b"\0" * (-len(content) % BLOCK))


def write_end(stream: IO[bytes]) -> None:
    stream.write(_END)


def read_members(stream: IO[bytes], where: str) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each member, in order. Raises PackError for the first thing that a writer does not write."""
    last = ""
    while (block := _exactly(stream, BLOCK, where)) != b"\0" * BLOCK:
        name, size = _parse(block, where)
        if name <= last:
            raise _bad(f"{where}: {name}", f"a member after {last}", "members in sorted order, each once")
        content = _exactly(stream, size, f"{where}: {name}")
        if any(_exactly(stream, -size % BLOCK, f"{where}: {name}")):
            raise _bad(f"{where}: {name}", "content where padding belongs", "a pack as `jitspark pack` writes it")
        last = name
        yield name, content
    if any(_exactly(stream, BLOCK, where)) or stream.read(1):
        raise _bad(where, "content after the end", "a pack as `jitspark pack` writes it")


def _parse(block: bytes, where: str) -> tuple[str, int]:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
    except (tarfile.HeaderError, UnicodeDecodeError, ValueError):
        raise _bad(where, "bytes that are no tar header", "a pack as `jitspark pack` writes it") from None
    name = info.name
    limit = _limit(name)
    if limit is None:
        raise _bad(f"{where}: {name[:200]!r}", "an unknown file", f"files of entries below {ARTIFACTS}/ only")
    if info.size > limit:
        raise _bad(f"{where}: {name}", f"{info.size} bytes", f"at most {limit} bytes")
    if info.size < 0 or block != _header(name, info.size):
        found = f"type {info.type!r}, mode {info.mode:o}, owner {info.uid}:{info.gid} or a time"
        raise _bad(f"{where}: {name}", found, "a regular file with fixed mode, owner and time")
    return name, info.size


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, _MODE
    try:
        return info.tobuf(tarfile.USTAR_FORMAT)
    except ValueError:
        raise _bad(name[:200], "a name too long for a pack", "names of at most 255 bytes") from None


def _limit(name: str) -> int | None:
    """How large the file of this name may be; None for a name that has no place in a pack."""
    member = _MEMBER.match(name) or RUNTIME_MEMBER.match(name)
    return _LIMITS.get(member["file"]) if member else None


def _exactly(stream: IO[bytes], size: int, where: str) -> bytes:
    content = stream.read(size)
    if len(content) != size:
        raise _bad(where, "the end of the file in the middle", "a whole pack")
    return content


def _bad(where: str, found: str, needed: str) -> PackError:
    return PackError(where=where, found=found, needed=needed, remedy="Make the pack again with `jitspark pack`.")
