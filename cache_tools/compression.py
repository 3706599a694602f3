"""A pack's outside: one zstandard frame, then a trailer with the frame's sha256 in a frame that decoders skip.

The trailer makes any changed byte an error, also one that would decompress to the same content. Reading is bounded:
what a crafted frame can make of one read is limited, whatever its ratio.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, cast

import zstandard

from cache_tools.archive import AS_WRITTEN, bad_pack

# Fixed, as equal entries must give equal bytes. 19 takes 14 times as long and makes 11 % less of it.
LEVEL = 10
# A reader's memory: more than level 10 looks back.
WINDOW = 8 * 1024 * 1024
# A block of 4 bytes can stand for 128 KiB: this many at once stand for at most 32 MiB.
_STEP = 1024
_SKIPPED = b"\x50\x2a\x4d\x18" + (40).to_bytes(4, "little") + b"jitspark"
TRAILER_BYTES = len(_SKIPPED) + 32


class _Hashed:
    """Passes bytes on to a file, and knows their digest."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.digest = hashlib.sha256()

    def write(self, content: bytes) -> int:
        self.digest.update(content)
        return self._stream.write(content)


@contextmanager
def compressed(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """A file to write a pack's content to; frame and trailer go to `stream`."""
    hashed = _Hashed(stream)
    compressor = zstandard.ZstdCompressor(level=LEVEL, threads=0, write_checksum=False, write_content_size=False)
    with compressor.stream_writer(cast("IO[bytes]", hashed), closefd=False) as writer:  # it only writes to it
        yield writer
    stream.write(_SKIPPED + hashed.digest.digest())


class Decompressed:
    """The content of a pack of `size` bytes. `finish` checks the trailer: nothing counts before that."""

    def __init__(self, stream: IO[bytes], size: int, where: str) -> None:
        self._stream = stream
        self._left = size - TRAILER_BYTES
        self._where = where
        self._ready = bytearray()
        self._digest = hashlib.sha256()
        self._frame = zstandard.ZstdDecompressor(max_window_size=WINDOW).decompressobj()
        if self._left <= 0:
            raise bad_pack(where, f"{size} bytes", "a whole pack")

    def read(self, size: int, /) -> bytes:
        while len(self._ready) < size and self._more():
            pass
        content = bytes(self._ready[:size])
        del self._ready[:size]
        return content

    def _more(self) -> bool:
        if not self._left:
            return False
        raw = self._stream.read(min(_STEP, self._left))
        self._left -= len(raw) or self._left
        self._digest.update(raw)
        if self._frame.eof and raw:
            raise bad_pack(self._where, "content after the end", AS_WRITTEN)
        try:
            self._ready += self._frame.decompress(raw)
        except zstandard.ZstdError as problem:
            raise bad_pack(self._where, f"bytes that do not decompress ({problem})", "an unchanged pack") from None
        if self._frame.unused_data:
            raise bad_pack(self._where, "content after the end", AS_WRITTEN)
        return True

    def finish(self) -> None:
        """Raise PackError unless all was read and every byte of the file is as it was written."""
        if self._ready or self.read(1):
            raise bad_pack(self._where, "content after the end", AS_WRITTEN)
        trailer = self._stream.read(TRAILER_BYTES + 1)
        if not self._frame.eof or trailer != _SKIPPED + self._digest.digest():
            raise bad_pack(self._where, "bytes that differ from the digest at its end", "an unchanged pack")
