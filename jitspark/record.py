"""The record beside an artifact: what it is, what it needs, and the digests that bind the two together.

A record file is canonical JSON, `{"body":{...},"digest":"..."}` plus a newline, where the digest covers the body's
bytes as they stand: any changed byte is noticed without parsing. Bytes from disk are hostile until checked here.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jitspark.errors import EntryError
from jitspark.key import Key, Recipe, canonical, digest_of, plain
from jitspark.toolchain import Toolchain

RECORD_VERSION = 1
MAX_RECORD_BYTES = 256 * 1024
MAX_ARTIFACT_BYTES = 64 * 1024 * 1024

_HEAD = b'{"body":'
_TAIL = b',"digest":"'
_END = b'"}\n'
_TAIL_LENGTH = len(_TAIL) + 64 + len(_END)
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}\Z")
_FLAVOUR = re.compile(r"cu[0-9]{1,3}\Z")


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
        recipe: Recipe, toolchain: Toolchain, content: bytes, signature: str, needs: tuple[str, ...], runtime: str
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


def record_from_bytes(content: bytes, where: str, key: Key, toolchain: str) -> Record:
    """The record in `content`, checked: its own digest, every field's type, and that it belongs to `key` and `toolchain`.

    Raises EntryError for anything else.
    """
    record = _parse(content, where)
    _check_fields(record, where)
    recipe = record.recipe
    named = (recipe.get("target"), recipe.get("host"), recipe.get("kernel"), digest_of(recipe), record.toolchain_digest)
    if named != (key.target, key.host, key.kernel, key.recipe, toolchain) or record.kernel != key.kernel:
        raise _bad(where, "a record of another entry", "the record of this recipe and toolchain")
    if record.symbol != f"__tvm_ffi_{key.kernel}":
        raise _bad(where, f"symbol {record.symbol[:80]!r}", f"__tvm_ffi_{key.kernel}")
    return record


def check_artifact(record: Record, content: bytes, where: str) -> None:
    """Raise EntryError unless `content` is the artifact that `record` describes, byte for byte."""
    if len(content) != record.size or hashlib.sha256(content).hexdigest() != record.sha256:
        raise _bad(where, f"{len(content)} bytes that differ from the record's digest", f"{record.size} bytes as built")


def _parse(content: bytes, where: str) -> Record:
    body = content[len(_HEAD) : -_TAIL_LENGTH]
    sealed = _HEAD + body + _TAIL + hashlib.sha256(body).hexdigest().encode() + _END
    if len(content) > MAX_RECORD_BYTES or content != sealed:
        raise _bad(where, "a record whose digest does not match its bytes", "an unchanged record")
    try:
        values = json.loads(body)
        values["needs"] = tuple(values["needs"])
        return Record(**values)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise _bad(where, "a record with other fields", f"a record of version {RECORD_VERSION}") from None


def _check_fields(record: Record, where: str) -> None:
    good = {
        "version": record.version == RECORD_VERSION and type(record.version) is int,
        "recipe": isinstance(record.recipe, dict),
        "toolchain": isinstance(record.toolchain, dict),
        "kernel": isinstance(record.kernel, str),
        "sha256": _matches(_DIGEST, record.sha256),
        "size": type(record.size) is int and 0 < record.size <= MAX_ARTIFACT_BYTES,
        "symbol": _matches(_SYMBOL, record.symbol),
        "signature": isinstance(record.signature, str) and len(record.signature) < 65536,
        "needs": len(record.needs) < 1000 and all(_matches(_SYMBOL, name) for name in record.needs),
        "runtime": _matches(_FLAVOUR, record.runtime),
    }
    wrong = [name for name, fine in good.items() if not fine]
    if wrong:
        raise _bad(where, f"an unusable field {wrong[0]!r}", f"a record of version {RECORD_VERSION}")


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.match(value) is not None


def _bad(where: str, found: str, needed: str) -> EntryError:
    return EntryError(where=where, found=found, needed=needed, remedy="The entry is a miss; it is rebuilt where allowed.")
