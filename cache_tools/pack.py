"""`pack`: entries into one file, or one directory, whose bytes depend on nothing but them."""

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cache_tools.archive import write_end, write_member
from cache_tools.contents import Contents, Runtime, contents_of, pack_members
from cache_tools.placing import new_file, new_folder, write_below
from cache_tools.plan_files import PlanFile
from jitspark.cache.store import Entry
from jitspark.errors import UsageError

FORMATS = ("tar.zst", "dir", "oci", "wheel")


@dataclass(frozen=True, slots=True)
class Form:
    """How to pack. `name` is a wheel's, `sign` the file of a private key."""

    form: str = FORMATS[0]
    name: str = ""
    sign: Path | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """What a pack came to: entries, plans, the file's size and digest (a directory has none), and who signed."""

    path: Path
    entries: int
    plans: int
    size: int
    sha256: str
    merkle_root: str
    signer: str


def pack(
    path: Path,
    entries: Iterable[Entry],
    runtime: Runtime | None = None,
    form: Form = Form(),
    plans: Iterable[PlanFile] = (),
) -> Packed:
    """Write `entries` and `plans` to `path`, which appears whole or not at all; a wheel goes into the directory `path`.

    Raises what `contents_of` does, PackError when the file cannot be written, UsageError for an unknown form.
    """
    if form.form not in FORMATS:
        raise UsageError(
            where="--format", found=repr(form.form), needed=f"one of {', '.join(FORMATS)}", remedy="Correct --format."
        )
    contents = contents_of(entries, runtime, str(path), form.sign, plans)
    return _writer(form)(path, contents)


def _writer(form: Form) -> Callable[[Path, Contents], Packed]:
    if form.form == "oci":
        from cache_tools.oci_layout import write_layout

        return write_layout
    if form.form == "wheel":
        from cache_tools.wheel import write_wheel

        return lambda path, contents: write_wheel(path, contents, form.name)
    return {"tar.zst": write_file, "dir": write_directory}[form.form]


def write_file(path: Path, contents: Contents) -> Packed:
    """The one file: a tar of the manifest and all files, compressed."""
    from cache_tools.compression import compressed

    with new_file(path) as stream:
        with compressed(stream) as archive:
            for name, content in pack_members(contents):
                write_member(archive, name, content)
            write_end(archive)
        stream.seek(0)
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        size = stream.tell()
    return packed(path, contents, size, sha256)


def write_directory(path: Path, contents: Contents) -> Packed:
    """A cache root that is ready to be copied into an image, with fixed modes and times."""
    with new_folder(path) as root:
        size = 0
        for name, content in contents.root_files():
            write_below(root, name, content)
            size += len(content)
        for folder, _, files in os.walk(root, topdown=False):
            for name in (*files, ""):
                os.utime(os.path.join(folder, name), (0, 0))
    return packed(path, contents, size, "")


def packed(path: Path, contents: Contents, size: int, sha256: str) -> Packed:
    return Packed(path, contents.entries, contents.plans, size, sha256, contents.manifest.merkle_root, contents.signer)
