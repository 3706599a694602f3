"""Ed25519 signatures of manifests, with keys in PEM files as OpenSSL writes them; the library comes when asked."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from cache_tools.archive import SIGNATURE, bad_pack
from jitspark.errors import PackError, ToolchainError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

MAX_KEY_BYTES = 64 * 1024
# A signature of anything else cannot be taken for one of a manifest.
_PURPOSE = b"jitspark pack manifest 1\n"
_FORM = re.compile(rb"ed25519 ([0-9a-f]{64}) ([0-9a-f]{128})\n\Z")


@dataclass(frozen=True, slots=True)
class Trust:
    """Whose packs to accept: those signed with one of `keys`; without keys any, if `allow_unsigned`."""

    keys: "tuple[Ed25519PublicKey, ...]" = ()
    allow_unsigned: bool = False


ANY = Trust(allow_unsigned=True)


def trust_in(files: Sequence[Path], *, allow_unsigned: bool) -> Trust:
    """Trust in the public keys of these files. Raises UsageError for a file that holds none."""
    return Trust(tuple(public_key(file) for file in files), allow_unsigned)


def private_key(file: Path) -> "Ed25519PrivateKey":
    """The key to sign with. Raises UsageError when the file holds no such key."""
    _require_library("--sign")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(_content(file, "--sign"), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it wants a passphrase
        raise _no_key(file, "--sign", "a file that holds no such key") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(file, "--sign", "a key of another kind")
    return key


def public_key(file: Path) -> "Ed25519PublicKey":
    """The key to check with. Raises UsageError when the file holds no such key."""
    _require_library("--trust")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        key = load_pem_public_key(_content(file, "--trust"))
    except (ValueError, UnsupportedAlgorithm):
        raise _no_key(file, "--trust", "a file that holds no such key") from None
    if not isinstance(key, Ed25519PublicKey):
        raise _no_key(file, "--trust", "a key of another kind")
    return key


def _require_library(option: str) -> None:
    if find_spec("cryptography") is None:
        raise ToolchainError(
            where=option,
            found="no `cryptography` library",
            needed="it, to sign packs and to check signatures",
            remedy="Install jitspark with its dependencies.",
        )


def _content(file: Path, option: str) -> bytes:
    try:
        with file.open("rb") as stream:
            return stream.read(MAX_KEY_BYTES)
    except OSError as problem:
        raise _no_key(file, option, problem.strerror or str(problem)) from None


def key_id(key: "Ed25519PublicKey") -> str:
    """What names a key: the sha256 of its 32 bytes."""
    return hashlib.sha256(key.public_bytes_raw()).hexdigest()


def signature_of(key: "Ed25519PrivateKey", manifest: bytes) -> bytes:
    """The content of the signature's file."""
    return f"ed25519 {key_id(key.public_key())} {key.sign(_PURPOSE + manifest).hex()}\n".encode()


def check_trust(trust: Trust, manifest: bytes | None, signature: bytes | None, where: str) -> str | None:
    """The id of the trusted key that signed `manifest`; None when nothing had to be signed.

    Raises PackError for what `trust` does not cover.
    """
    signer = None if signature is None else _parts(signature, where)[0]
    if trust.keys:
        return _signed_by(trust, manifest, signature, where)
    if trust.allow_unsigned:
        return None
    raise PackError(
        where=where,
        found=f"a pack signed with the key {signer[:16]}" if signer else "a pack that nobody signed",
        needed="a signature of a key that is trusted here, since loading a kernel runs its code",
        remedy="Name the signer's public key with --trust KEY.pub, or accept the pack with --allow-unsigned.",
    )


def _signed_by(trust: Trust, manifest: bytes | None, signature: bytes | None, where: str) -> str:
    if signature is None or manifest is None:
        raise PackError(
            where=where,
            found="a pack that nobody signed",
            needed="a signature of a key that --trust names",
            remedy="Have it signed with `jitspark pack --sign KEY`.",
        )
    from cryptography.exceptions import InvalidSignature

    signer, content = _parts(signature, where)
    keys = {key_id(key): key for key in trust.keys}
    if signer not in keys:
        raise PackError(
            where=f"{where}: {SIGNATURE}",
            found=f"a signature of the key {signer[:16]}",
            needed=f"one of {', '.join(name[:16] for name in keys)}, which --trust names",
            remedy="Do not use the pack, unless that key should be trusted too.",
        )
    try:
        keys[signer].verify(content, _PURPOSE + manifest)
    except InvalidSignature:
        raise PackError(
            where=f"{where}: {SIGNATURE}",
            found="a signature that is not this manifest's",
            needed="an unchanged pack",
            remedy="Do not use the pack; have it made again.",
        ) from None
    return signer


def _parts(signature: bytes, where: str) -> tuple[str, bytes]:
    form = _FORM.match(signature)
    if form is None:
        raise bad_pack(f"{where}: {SIGNATURE}", "no signature", "a line as `jitspark pack --sign` writes it")
    return form[1].decode(), bytes.fromhex(form[2].decode())


def _no_key(file: Path, option: str, found: str) -> UsageError:
    kind = "private" if option == "--sign" else "public"
    return UsageError(
        where=f"{option} {file}",
        found=found,
        needed=f"an Ed25519 {kind} key as PEM, without passphrase",
        remedy="Make one with `openssl genpkey -algorithm ed25519` (its public half: `openssl pkey -pubout`).",
    )
