"""`--format wheel`: a cache root as a Python package, found as a read-only layer where it is installed.

The root lies in the folder `jitspark_cache/<name>`, which `jitspark.installed_caches` looks for. No code in it.
"""

import base64
import hashlib
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import jitspark
from cache_tools.contents import Contents
from cache_tools.pack import Packed, packed
from cache_tools.placing import new_file
from jitspark.errors import PackError, UsageError
from jitspark.installed_caches import FOLDER

_NAME = re.compile(r"[a-z0-9]+(_[a-z0-9]+)*\Z")
# The earliest time that a zip file can tell.
_TIME = (1980, 1, 1, 0, 0, 0)
_FILE = 0o100444 << 16


def write_wheel(directory: Path, contents: Contents, name: str) -> Packed:
    """Write `jitspark_cache_<name>-<version>-py3-none-<platform>.whl` into `directory`.

    The version is jitspark's and the start of the merkle root: other contents, another version. Raises UsageError for
    a name that no package can have, and for entries of several hosts.
    """
    distribution, version = _distribution(name), f"{jitspark.__version__}+{contents.manifest.merkle_root[:12]}"
    tag = f"py3-none-{_platform(contents)}"
    if not directory.is_dir():
        raise PackError(
            where=str(directory), found="no such directory", needed="one to put the wheel into", remedy="Make it first."
        )
    path = directory / f"{distribution}-{version}-{tag}.whl"
    with new_file(path) as stream:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            recorded = []
            for place, content in _files(contents, name, f"{distribution}-{version}.dist-info", tag):
                _add(archive, place, content)
                recorded.append(f"{place},sha256={_urlsafe(hashlib.sha256(content).digest())},{len(content)}\n")
            record = f"{distribution}-{version}.dist-info/RECORD"
            _add(archive, record, "".join([*recorded, f"{record},,\n"]).encode())
        stream.seek(0)
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        size = stream.tell()
    return packed(path, contents, size, sha256)


def _files(contents: Contents, name: str, info: str, tag: str) -> Iterator[tuple[str, bytes]]:
    for place, content in contents.root_files():
        yield f"{FOLDER}/{name}/{place}", content
    distribution, version = info.removesuffix(".dist-info").rsplit("-", 1)
    targets = ", ".join(contents.manifest.needs.targets)
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
    metadata += f"Summary: Compiled kernels for jitspark: {contents.entries} entries for {targets}\n"
    yield f"{info}/METADATA", metadata.encode()
    yield f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: jitspark\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()


def _distribution(name: str) -> str:
    if len(name) > 100 or not _NAME.match(name):
        raise UsageError(
            where="--name",
            found=repr(name[:100]),
            needed="the wheel's name as <geometry>_<target>_tp<N>: small letters, digits, underscores",
            remedy="`jitspark pack --tp 8 --target sm_100a` makes one; elsewhere name it with --name.",
        )
    return f"jitspark_cache_{name}"


def _platform(contents: Contents) -> str:
    hosts = contents.manifest.needs.hosts
    if len(hosts) != 1:
        raise UsageError(
            where="--format wheel",
            found=f"entries for {', '.join(hosts)}",
            needed="entries of one host, as a wheel is for one",
            remedy="Make a wheel for each host, from a cache of that host.",
        )
    machine, _, system = hosts[0].partition("-")
    return f"{system}_{machine}"


def _add(archive: zipfile.ZipFile, place: str, content: bytes) -> None:
    member = zipfile.ZipInfo(place, _TIME)
    member.create_system, member.external_attr, member.compress_type = 3, _FILE, zipfile.ZIP_DEFLATED
    archive.writestr(member, content)


def _urlsafe(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
