"""`--format oci`: an OCI image layout of one image with one layer, which is a cache root. Standard tools read it.

The layer is compressed with gzip, which every tool knows; its diff id does not depend on how zlib was built.
"""

import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cache_tools.archive import FILE_MODE
from cache_tools.contents import Contents
from cache_tools.pack import Packed, packed
from cache_tools.placing import new_folder, write_below
from jitspark.cache.folders import FOLDER_MODE
from jitspark.errors import UsageError

_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_INDEX = "application/vnd.oci.image.index.v1+json"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
TAG = "cache"


@dataclass(frozen=True, slots=True)
class _Blob:
    media_type: str
    digest: str
    size: int

    def descriptor(self, **more: Any) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": f"sha256:{self.digest}", "size": self.size, **more}


def write_layout(path: Path, contents: Contents) -> Packed:
    """Write the layout's directory. `Packed.size` and `sha256` are the layer's."""
    platform = _platform(contents)
    annotations = _annotations(contents)
    with new_folder(path) as folder:
        diff_id, layer = _write_layer(folder, contents)
        config = _write_json(
            folder,
            _CONFIG,
            {**platform, "config": {}, "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff_id}"]}},
        )
        manifest = _write_json(
            folder,
            _MANIFEST,
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": config.descriptor(),
                "layers": [layer.descriptor()],
                "annotations": annotations,
            },
        )
        named = manifest.descriptor(platform=platform, annotations={"org.opencontainers.image.ref.name": TAG})
        index = {"schemaVersion": 2, "mediaType": _INDEX, "manifests": [named]}
        write_below(folder, "index.json", _json(index))
        write_below(folder, "oci-layout", _json({"imageLayoutVersion": "1.0.0"}))
    return packed(path, contents, layer.size, layer.digest)


def _platform(contents: Contents) -> dict[str, str]:
    hosts = contents.manifest.needs.hosts
    machine, _, system = hosts[0].partition("-")
    if len(hosts) != 1 or machine not in _ARCHITECTURES:
        raise UsageError(
            where="--format oci",
            found=f"entries for {', '.join(hosts)}",
            needed="entries of one host, as an image is for one",
            remedy="Make an image for each host, from a cache of that host.",
        )
    return {"architecture": _ARCHITECTURES[machine], "os": system}


def _annotations(contents: Contents) -> dict[str, str]:
    needs = contents.manifest.needs
    told = {
        "org.opencontainers.image.title": "jitspark cache",
        "jitspark.merkle-root": contents.manifest.merkle_root,
        "jitspark.entries": str(contents.entries),
        "jitspark.hosts": ",".join(needs.hosts),
        "jitspark.targets": ",".join(needs.targets),
        "jitspark.runtimes": ",".join(needs.runtimes),
    }
    return {**told, "jitspark.signer": contents.signer} if contents.signer else told


def _write_layer(folder: Path, contents: Contents) -> tuple[str, _Blob]:
    """The diff id (of the tar) and the blob (of what it compresses to)."""
    plain, packed_digest, size = hashlib.sha256(), hashlib.sha256(), 0
    gzip = zlib.compressobj(6, zlib.DEFLATED, 16 + zlib.MAX_WBITS)  # its header holds no time and no name
    write_below(folder, "blobs/sha256/layer", b"")
    staged = folder / "blobs/sha256/layer"
    staged.chmod(0o644)
    with staged.open("wb") as stream:
        for piece in (*_tar(contents), None):
            plain.update(piece or b"")
            compressed = gzip.flush() if piece is None else gzip.compress(piece)
            packed_digest.update(compressed)
            size += stream.write(compressed)
    staged.chmod(FILE_MODE)
    os.rename(staged, staged.with_name(packed_digest.hexdigest()))
    return plain.hexdigest(), _Blob(_LAYER, packed_digest.hexdigest(), size)


def _tar(contents: Contents) -> Iterator[bytes]:
    """The layer's bytes: folders before what lies in them, everything root's."""
    made: set[str] = set()
    for name, content in contents.root_files():
        for folder in reversed(Path(name).parents[:-1]):
            if str(folder) not in made:
                made.add(str(folder))
                yield _header(f"{folder}/", tarfile.DIRTYPE, FOLDER_MODE, 0)
        yield _header(name, tarfile.REGTYPE, FILE_MODE, len(content))
        yield content
        yield b"\0" * (-len(content) % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)


def _header(name: str, kind: bytes, mode: int, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.type, info.mode, info.size = kind, mode, size
    return info.tobuf(tarfile.USTAR_FORMAT)


def _write_json(folder: Path, media_type: str, value: Any) -> _Blob:
    content = _json(value)
    digest = hashlib.sha256(content).hexdigest()
    write_below(folder, f"blobs/sha256/{digest}", content)
    return _Blob(media_type, digest, len(content))


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
