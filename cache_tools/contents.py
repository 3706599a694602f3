"""What a pack in any form holds: files of entries, plans and a runtime library, and the manifest over them."""

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cache_tools.archive import LICENCE, MANIFEST, RUNTIME_LIBRARY, SIGNATURE
from cache_tools.manifest import ListedFile, Manifest, manifest_of, needs_of
from cache_tools.plan_files import PlanFile
from jitspark.cache.runtime_library import RUNTIME
from jitspark.cache.store import ARTIFACT, RECORD, Entry, entry_parts
from jitspark.errors import EntryError, PackError

PACKS = "packs-v1"
# The sections that compilers put source paths into: their names stand in an artifact as they are, also in its device
# code. Not `.debug_frame`: every artifact has it, and it holds no names.
_DEBUG_SECTION = re.compile(rb"\.(?:debug_(?:line|line_str|info|str|macro|types)|nv_debug_(?:line|info|ptx)[a-z_]*)\0")


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runtime library to carry: its CUDA flavour, its bytes, its licence's text (empty if unknown)."""

    flavour: str
    library: bytes
    licence: bytes


@dataclass(frozen=True, slots=True)
class Contents:
    """A manifest and the means to read each of its files; `signature` is empty where nobody signed.

    `signer` is the id of the key that did.
    """

    manifest: Manifest
    readers: tuple[Callable[[], bytes], ...]
    entries: int
    plans: int
    signature: bytes = b""
    signer: str = ""

    def files(self) -> Iterator[tuple[str, bytes]]:
        """(path, content) of each file, sorted; raises EntryError or PackError for one that has changed since."""
        for listed, read in zip(self.manifest.files, self.readers, strict=True):
            content = read()
            if len(content) != listed.size or hashlib.sha256(content).hexdigest() != listed.sha256:
                raise PackError(
                    where=listed.path,
                    found="other bytes than a moment ago",
                    needed="files that nobody changes meanwhile",
                    remedy="Run the command again.",
                )
            yield listed.path, content

    def root_files(self) -> Iterator[tuple[str, bytes]]:
        """The files of a cache root: these, and where somebody signed, the manifest and its signature."""
        yield from self.files()
        if self.signature:
            yield from signed_files(self.manifest, self.signature)


def signed_files(manifest: Manifest, signature: bytes) -> tuple[tuple[str, bytes], ...]:
    """Where a cache root keeps a manifest and its signature."""
    stem = f"{PACKS}/{manifest.merkle_root}"
    return (f"{stem}.json", manifest.to_bytes()), (f"{stem}.sig", signature)


def contents_of(
    entries: Iterable[Entry],
    runtime: Runtime | None,
    where: str,
    sign: Path | None = None,
    plans: Iterable[PlanFile] = (),
) -> Contents:
    """The contents for `entries` and `plans` (of equal ones the first), signed with the key in `sign`.

    Raises PackError when there is nothing to pack, or two entries of one key and toolchain differ, or two plans of one
    name, EntryError for an entry that is damaged or, when signing, tells where its sources lay; UsageError for a key
    that cannot be used.
    """
    chosen, steps = _unique(entries, where), _unique_plans(plans)
    listed: list[tuple[ListedFile, Callable[[], bytes]]] = []
    for directory, entry in chosen.items():
        listed.append((_listed(f"{directory}/{RECORD}", entry.record.to_bytes()), entry.record.to_bytes))
        artifact = ListedFile(f"{directory}/{ARTIFACT}", entry.record.size, entry.record.sha256)
        listed.append((artifact, entry.read_artifact))
    listed += [(_listed(each.path, each.content), partial(bytes, each.content)) for each in steps]
    if runtime is not None:
        listed += _runtime_files(runtime)
    listed.sort(key=lambda each: each[0])
    manifest = manifest_of((file for file, _ in listed), needs_of((e.key, e.record) for e in chosen.values()))
    contents = Contents(manifest, tuple(read for _, read in listed), len(chosen), len(steps))
    return contents if sign is None else _signed(contents, chosen.values(), sign)


def _unique(entries: Iterable[Entry], where: str) -> dict[str, Entry]:
    chosen: dict[str, Entry] = {}
    for entry in entries:
        directory = "/".join(entry_parts(entry.key, entry.toolchain))
        if chosen.setdefault(directory, entry).record.sha256 != entry.record.sha256:
            raise PackError(
                where=directory,
                found=f"different bytes in {chosen[directory].where} and {entry.where}",
                needed="one artifact for one key and toolchain",
                remedy="Find out which builder is at fault: `jitspark verify --rebuild 100%`.",
            )
    if not chosen:
        raise PackError(
            where=where, found="no entry to pack", needed="at least one", remedy="Fill the cache with `jitspark warm`."
        )
    return chosen


def _unique_plans(plans: Iterable[PlanFile]) -> list[PlanFile]:
    chosen: dict[str, PlanFile] = {}
    for each in plans:
        if chosen.setdefault(each.name, each).content != each.content:
            raise PackError(
                where=each.path,
                found="different bytes in two places",
                needed="one plan for one name",
                remedy="Remove the one of another version of jitspark, and run `jitspark warm`.",
            )
    return list(chosen.values())


def _runtime_files(runtime: Runtime) -> list[tuple[ListedFile, Callable[[], bytes]]]:
    folder = f"{RUNTIME}/{runtime.flavour}"
    files = {LICENCE: runtime.licence, RUNTIME_LIBRARY: runtime.library}
    return [(_listed(f"{folder}/{name}", each), partial(bytes, each)) for name, each in files.items() if each]


def _listed(path: str, content: bytes) -> ListedFile:
    return ListedFile(path, len(content), hashlib.sha256(content).hexdigest())


def _signed(contents: Contents, entries: Iterable[Entry], sign: Path) -> Contents:
    from cache_tools.signing import key_id, private_key, signature_of

    key = private_key(sign)
    for entry in entries:
        sections = sorted({found[:-1].decode() for found in _DEBUG_SECTION.findall(entry.read_artifact())})
        if sections:
            raise EntryError(
                where=f"{entry.key} in {entry.where}",
                found=f"debug information ({', '.join(sections)}), which names folders of the building machine",
                needed="artifacts without it, to be signed",
                remedy="Build the entry without line information, or pack without --sign.",
            )
    signature = signature_of(key, contents.manifest.to_bytes())
    return replace(contents, signature=signature, signer=key_id(key.public_key()))


def pack_members(contents: Contents) -> Iterator[tuple[str, bytes]]:
    """(name, content) of each member of a pack: the manifest, its signature if any, then the files."""
    yield MANIFEST, contents.manifest.to_bytes()
    if contents.signature:
        yield SIGNATURE, contents.signature
    yield from contents.files()
