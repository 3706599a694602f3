"""Reading a pack: hostile until proven otherwise.

The manifest comes first and is checked against a signature before anything else is read; what follows must be the
files that it lists. The last byte is checked too, so whoever iterates to the end has read an unchanged pack.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cache_tools.archive import MANIFEST, MAX_SIGNATURE_BYTES, SIGNATURE, Members, Source, bad_pack
from cache_tools.manifest import MAX_TOTAL_BYTES, ListedFile, Manifest, manifest_from_bytes
from cache_tools.signing import Trust, check_trust

_ZSTANDARD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True, slots=True)
class OpenedPack:
    """A pack whose signature has been checked. `manifest` is None for a plain tar of earlier versions.

    `signer` is the id of the trusted key that signed it; `signature` stands there whether it was asked for or not.
    """

    manifest: Manifest | None
    signature: bytes | None
    signer: str | None
    files: Iterator[tuple[str, bytes]]


@contextmanager
def opened_pack(file: Path, trust: Trust) -> Iterator[OpenedPack]:
    """A pack, for reading. Raises PackError for a file that is none or that `trust` does not cover.

    `files` yields (path, content) and raises PackError at the first thing that does not belong there.
    """
    where = str(file)
    try:
        stream = file.open("rb")
    except OSError as problem:
        raise bad_pack(where, problem.strerror or str(problem), "a readable pack") from None
    with stream:
        try:
            magic, size = stream.read(len(_ZSTANDARD)), os.fstat(stream.fileno()).st_size
            stream.seek(0)
        except OSError as problem:
            raise bad_pack(where, problem.strerror or str(problem), "a readable pack") from None
        if magic != _ZSTANDARD:
            yield _opened(stream, where, trust, compressed=False)
            return
        from cache_tools.compression import Decompressed

        source = Decompressed(stream, size, where)
        found = _opened(source, where, trust, compressed=True)
        yield OpenedPack(found.manifest, found.signature, found.signer, _finished(found.files, source.finish))


def _finished(files: Iterator[tuple[str, bytes]], finish: Callable[[], None]) -> Iterator[tuple[str, bytes]]:
    yield from files
    finish()


def _opened(source: Source, where: str, trust: Trust, *, compressed: bool) -> OpenedPack:
    members = Members(source, where)
    first = members.header()
    if first is None or first[0] != MANIFEST:
        if compressed:
            raise bad_pack(where, "no manifest at its start", "a pack as `jitspark pack` writes it")
        check_trust(trust, None, None, where)
        return OpenedPack(None, None, None, _unlisted(members, first))
    content = members.content()
    second, signature = members.header(), None
    if second is not None and second[0] == SIGNATURE:
        signature, second = members.content()[:MAX_SIGNATURE_BYTES], members.header()
    signer = check_trust(trust, content, signature, where)
    manifest = manifest_from_bytes(content, where)
    return OpenedPack(manifest, signature, signer, _listed(members, second, manifest, where))


def _listed(
    members: Members, header: tuple[str, int] | None, manifest: Manifest, where: str
) -> Iterator[tuple[str, bytes]]:
    for file in manifest.files:
        _check_header(header, file, where)
        content = members.content()
        if hashlib.sha256(content).hexdigest() != file.sha256:
            raise bad_pack(f"{where}: {file.path}", "bytes that differ from the manifest's digest", "an unchanged pack")
        yield file.path, content
        header = members.header()
    if header is not None:
        raise bad_pack(f"{where}: {header[0]}", "a file that the manifest does not list", "an unchanged pack")


def _check_header(header: tuple[str, int] | None, file: ListedFile, where: str) -> None:
    if header != (file.path, file.size):
        found = "the end" if header is None else f"{header[0]} of {header[1]} bytes"
        raise bad_pack(f"{where}: {file.path}", f"{found} in its place", f"{file.size} bytes of this file")


def _unlisted(members: Members, header: tuple[str, int] | None) -> Iterator[tuple[str, bytes]]:
    total = 0
    while header is not None:
        total += header[1]
        if total > MAX_TOTAL_BYTES:
            raise bad_pack(header[0], f"more than {MAX_TOTAL_BYTES} bytes", f"at most {MAX_TOTAL_BYTES}")
        yield header[0], members.content()
        header = members.header()
