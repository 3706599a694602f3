"""The record beside an artifact: what it is, what it needs, and the digests that bind the two together.

A record file is canonical JSON, `{"body":{...},"digest":"..."}` plus a newline, where the digest covers the body's
bytes as they stand: any changed byte is noticed without parsing. Bytes from disk are hostile until checked here.
"""

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from jitspark.errors import EntryError
from jitspark.key import Key, canonical, digest_of, plain

if TYPE_CHECKING:  # a process that only loads makes no records
    from jitspark.key import Recipe
    from jitspark.toolchain import Toolchain

RECORD_VERSION = 1
MAX_RECORD_BYTES = 256 * 1024
MAX_ARTIFACT_BYTES = 64 * 1024 * 1024

# What walks over a record's values later must not run out of stack.
_MAX_DEPTH = 50
_MANY_BRACKETS = 200

_HEAD = b'{"body":'
_TAIL = b',"digest":"'
_END = b'"}\n'
_TAIL_LENGTH = len(_TAIL) + 64 + len(_END)
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}\Z")
_FLAVOUR = re.compile(r"cu[0-9]{1,3}\Z")
# Printable, as it is shown to people: no escape sequence, no lone surrogate.
_SIGNATURE = re.compile(r"[ -~]{1,65535}\Z")
_ELF_HEADER = 64
_SEGMENT = struct.Struct("<IIQQQQQQ")  # type, flags, offset, two addresses, size in the file, size in memory, alignment
# How `canonical` writes what is plain already.
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class Record:
    """An artifact's description. It holds no time, user or path, so equal builds give equal records.

    `recipe` and `toolchain` are what the digests in the entry's path were computed from. `needs` lists the symbols
    that the process must offer (the runtime ABI), `runtime` the CUDA flavour of the runtime library to offer them.
    """

    version: int
    kernel: str
    recipe: Mapping[str, Any]
    toolchain: Mapping[str, Any]
    sha256: str
    size: int
    symbol: str
    signature: str
    needs: tuple[str, ...]
    runtime: str

    @property
    def toolchain_digest(self) -> str:
        return digest_of(self.toolchain)

    @staticmethod
    def of(
        recipe: "Recipe", toolchain: "Toolchain", content: bytes, signature: str, needs: tuple[str, ...], runtime: str
    ) -> "Record":
        """The record of the artifact `content`, compiled from `recipe` by `toolchain`."""
        return Record(
            version=RECORD_VERSION,
            kernel=recipe.kernel,
            recipe=plain(recipe),
            toolchain=plain(toolchain),
            sha256=hashlib.sha256(content).hexdigest(),
            size=len(content),
            symbol=f"__tvm_ffi_{recipe.kernel}",
            signature=signature,
            needs=needs,
            runtime=runtime,
        )

    def to_bytes(self) -> bytes:
        body = canonical(self)
        return _HEAD + body + _TAIL + hashlib.sha256(body).hexdigest().encode() + _END


_FIELDS = {field.name for field in fields(Record)}


def record_from_bytes(content: bytes, where: str, key: Key, toolchain: str) -> Record:
    """The record in `content`, checked: its own digest, every field's type, that it is of `key` and `toolchain`.

    Raises EntryError for anything else.
    """
    values, recipe_digest, toolchain_digest = _parse(content, where)
    _check_fields(values, where)
    record = Record(**{**values, "needs": tuple(values["needs"])})
    recipe = record.recipe
    named = (recipe.get("target"), recipe.get("host"), recipe.get("kernel"), recipe_digest, toolchain_digest)
    if named != (key.target, key.host, key.kernel, key.recipe, toolchain) or record.kernel != key.kernel:
        raise _bad(where, "a record of another entry", "the record of this recipe and toolchain")
    if record.symbol != f"__tvm_ffi_{key.kernel}":
        raise _bad(where, f"symbol {record.symbol[:80]!r}", f"__tvm_ffi_{key.kernel}")
    return record


def check_artifact(record: Record, content: bytes, where: str) -> None:
    """Raise EntryError unless `content` is the artifact that `record` describes, byte for byte."""
    if len(content) != record.size or hashlib.sha256(content).hexdigest() != record.sha256:
        raise _bad(where, f"{len(content)} bytes that differ from the record's digest", f"{record.size} bytes as built")


def check_library(content: bytes, where: str) -> None:
    """Raise EntryError unless `content` is a whole 64-bit ELF library: mapping one that was cut off is a SIGBUS."""
    problem = "no 64-bit ELF library"
    if content[:6] == b"\x7fELF\x02\x01" and len(content) >= _ELF_HEADER:
        (start,) = struct.unpack_from("<Q", content, 32)
        size, count = struct.unpack_from("<HH", content, 54)
        problem = "" if size == _SEGMENT.size and start + size * count <= len(content) else "an ELF library cut short"
        for index in range(0 if problem else count):
            _, _, offset, _, _, in_file, _, _ = _SEGMENT.unpack_from(content, start + index * size)
            if offset + in_file > len(content):
                problem = "an ELF library cut short"
    if problem:
        raise _bad(where, problem, "a whole library")


def _parse(content: bytes, where: str) -> tuple[dict[str, Any], str, str]:
    """The body's values, and the digests of recipe and toolchain.

    The body is canonical, so these two stand in it byte for byte as they were hashed. They are cut out and hashed; only
    the rest, which is small, is written again to see that it is canonical, in half the time.
    """
    body = content[len(_HEAD) : -_TAIL_LENGTH]
    sealed = _HEAD + body + _TAIL + hashlib.sha256(body).hexdigest().encode() + _END
    if len(content) > MAX_RECORD_BYTES or content != sealed:
        raise _bad(where, "a record whose digest does not match its bytes", "an unchanged record")
    head, recipe, rest = _cut(body, b'"recipe":', b',"runtime":')
    middle, toolchain, end = _cut(rest, b'"toolchain":', b',"version":')
    frame = head + b"0" + middle + b"0" + end
    try:
        values, parts = _load(frame), {"recipe": _load(recipe), "toolchain": _load(toolchain)}
        written = _CANONICAL.encode(values).encode()
    except (ValueError, RecursionError):
        raise _bad(where, "a record that is no JSON", f"a record of version {RECORD_VERSION}") from None
    if written != frame or not isinstance(values, dict) or values.keys() != _FIELDS:
        raise _bad(where, "a record with other fields", f"a record of version {RECORD_VERSION}")
    return values | parts, hashlib.sha256(recipe).hexdigest(), hashlib.sha256(toolchain).hexdigest()


def _cut(text: bytes, before: bytes, after: bytes) -> tuple[bytes, bytes, bytes]:
    """`text` around and between two marks; where they are missing, parts that are no JSON."""
    start, end = text.find(before) + len(before), text.rfind(after)
    return text[:start], text[start:end], text[end:]


def _load(text: bytes) -> Any:
    if text.count(b"[") + text.count(b"{") > _MANY_BRACKETS and _depth(text) > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    return json.loads(text, parse_float=_refuse, parse_constant=_refuse)


def _depth(text: bytes) -> int:
    """How deeply the text nests, or more where brackets stand in strings."""
    depth = deepest = 0
    for byte in text:
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    return deepest


def _refuse(number: str) -> None:
    raise ValueError(number)


def _check_fields(values: dict[str, Any], where: str) -> None:
    good = {
        "version": type(values["version"]) is int and values["version"] == RECORD_VERSION,
        "recipe": isinstance(values["recipe"], dict),
        "toolchain": isinstance(values["toolchain"], dict),
        "kernel": isinstance(values["kernel"], str),
        "sha256": _matches(_DIGEST, values["sha256"]),
        "size": type(values["size"]) is int and 0 < values["size"] <= MAX_ARTIFACT_BYTES,
        "symbol": _matches(_SYMBOL, values["symbol"]),
        "signature": _matches(_SIGNATURE, values["signature"]),
        "needs": _symbols(values["needs"]),
        "runtime": _matches(_FLAVOUR, values["runtime"]),
    }
    wrong = [name for name, fine in good.items() if not fine]
    if wrong:
        raise _bad(where, f"an unusable field {wrong[0]!r}", f"a record of version {RECORD_VERSION}")


def _symbols(value: Any) -> bool:
    return isinstance(value, list) and len(value) < 1000 and all(_matches(_SYMBOL, name) for name in value)


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.match(value) is not None


def _bad(where: str, found: str, needed: str) -> EntryError:
    return EntryError(where=where, found=found, needed=needed, remedy="The entry is a miss; it is rebuilt if allowed.")
