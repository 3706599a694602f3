"""`unpack`: the entries and plans of a pack into a cache, all of them verified before the first appears.

A pack with one wrong byte leaves the cache as it was; otherwise each entry, then each plan, appears by one rename.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cache_tools.archive import MANIFEST, bad_pack, is_plan, is_runtime
from cache_tools.contents import signed_files
from cache_tools.manifest import Manifest, Needs, needs_of
from cache_tools.opened import OpenedPack, opened_pack
from cache_tools.plan_files import PlanFile, PlanFiles
from cache_tools.signing import Trust
from jitspark.cache.folders import FILE_MODE, cannot_write, make_folder, sync
from jitspark.cache.record import Record, check_artifact, record_from_bytes
from jitspark.cache.runtime_library import RUNTIME
from jitspark.cache.staging import staging
from jitspark.cache.store import ARTIFACT, RECORD, Layer, publish, read_entry
from jitspark.errors import EntryError, PackError, PlanError
from jitspark.key import Key

logger = logging.getLogger("jitspark")


@dataclass(frozen=True, slots=True)
class Unpacked:
    """What unpacking came to: entries that are new in the cache, and those that it had; plans; who signed the pack."""

    new: int
    kept: int
    needs: Needs
    signer: str | None = None
    plans: int = 0


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """An entry of a pack, whole: record, artifact and path belong together."""

    key: Key
    record: Record
    artifact: bytes


@dataclass(frozen=True, slots=True)
class _Staged:
    key: Key
    record: Record
    directory: Path


def unpack(file: Path, layer: Layer, trust: Trust, accept: Callable[[Needs], None] = lambda _: None) -> Unpacked:
    """Put every entry of `file` into the cache `layer`, leaving good ones there as they are.

    `accept` is asked about what the pack needs before anything appears in the cache, and may raise. Raises PackError
    for a pack that is damaged, not covered by `trust`, or holds anything but entries, and where the cache has another
    runtime library than the pack (the cache is untouched then), CacheDirectoryError when the root cannot be written to.
    """
    root = layer.root
    with opened_pack(file, trust) as pack, staging(root, trusted=layer.trusted) as folder:
        staged, plans, others = _stage(pack, str(file), root, folder)
        needs = needs_of((each.key, each.record) for each in staged)
        accept(needs)
        _refuse_other_runtime((path.relative_to(folder) for path in others), folder, layer)
        fresh = [each for each in staged if not _present(layer, each)]
        for each in fresh:
            publish(root, each.key, each.record, each.directory, trusted=layer.trusted)
        for path in (*(path for path in plans if not _is_plan_there(layer, path.name)), *others):
            _place_file(path, path.relative_to(folder), layer)
    return Unpacked(len(fresh), len(staged) - len(fresh), needs, pack.signer, len(plans))


def _stage(pack: OpenedPack, where: str, root: Path, folder: Path) -> tuple[list[_Staged], list[Path], list[Path]]:
    """Everything in the pack, checked and written below `folder`: entries, plans, and the other files."""
    entries: list[_Staged] = []
    plans: list[Path] = []
    others: list[Path] = []
    for item in packed_items(pack, where):
        if isinstance(item, PackedEntry):
            path = _write(folder / str(len(entries)) / ARTIFACT, item.artifact, root)
            entries.append(_Staged(item.key, item.record, path.parent))
        elif isinstance(item, PlanFile):
            plans.append(_write(folder / item.path, item.content, root))
        else:
            others.append(_write(folder / item[0], item[1], root))
    if pack.manifest is not None and pack.signature is not None:
        others += [
            _write(folder / path, content, root) for path, content in signed_files(pack.manifest, pack.signature)
        ]
    return entries, plans, others


def packed_items(pack: OpenedPack, where: str) -> Iterator[PackedEntry | PlanFile | tuple[str, bytes]]:
    """Each entry, each plan, and (path, content) of a runtime library's files. Raises PackError for anything else."""
    seen: list[tuple[Key, Record]] = []
    targets: dict[str, str] = {}  # of plans, with one of these
    files, plans = pack.files, PlanFiles()
    for name, content in files:
        place, _, kind = name.rpartition("/")
        if is_runtime(name):
            if pack.manifest is None:
                _check_side_file(name, content, next(files, ("the end", b"")), where)
            yield name, content
        elif is_plan(name):
            if pack.manifest is None:
                raise bad_pack(f"{where}: {name}", "a plan in a pack without a manifest", "entries only")
            plan = plans.packed(name, content, f"{where}: {name}")
            targets.setdefault(plan.plan.target, name)
            yield plan
        else:
            second, record = next(files, ("the end", b""))
            if kind != ARTIFACT or second != f"{place}/{RECORD}":
                raise bad_pack(f"{where}: {name}", f"{second} after it", "each artifact followed by its record")
            entry = _checked(place, content, record, f"{where}: {place}")
            seen.append((entry.key, entry.record))
            yield entry
    if not seen:
        raise bad_pack(where, "no entry", "at least one")
    _check_needs(pack.manifest, seen, targets, where)


def _check_needs(
    manifest: Manifest | None, seen: list[tuple[Key, Record]], targets: dict[str, str], where: str
) -> None:
    """What a machine is asked for before unpacking must be what entries and plans need."""
    needs = needs_of(seen)
    if manifest is not None and manifest.needs != needs:
        raise bad_pack(f"{where}: {MANIFEST}", "needs that are not its entries'", "an unchanged manifest")
    for target in sorted(targets.keys() - set(needs.targets)):
        raise bad_pack(
            f"{where}: {targets[target]}",
            f"a plan for {target}, for which the pack has no entry",
            "its kernels beside it",
        )


def _check_side_file(name: str, content: bytes, side: tuple[str, bytes], where: str) -> None:
    """A plain tar has no manifest: its runtime library comes with a file that holds its digest."""
    wanted = (f"{name}.sha256", hashlib.sha256(content).hexdigest().encode())
    if side != wanted:
        raise bad_pack(f"{where}: {name}", "a runtime library that differs from its digest", "the library as packed")


def _checked(place: str, artifact: bytes, record_bytes: bytes, where: str) -> PackedEntry:
    """The entry in these bytes. Raises PackError unless record, artifact and path belong together."""
    _, target_host, kernel, recipe, toolchain = place.split("/")
    target, _, host = target_host.partition("-")
    try:
        key = Key(target, host, kernel, recipe)
        record = record_from_bytes(record_bytes, where, key, toolchain)
        check_artifact(record, artifact, where)
    except ValueError:
        raise bad_pack(where, "a path that is no key's", "entries of this version") from None
    except EntryError as problem:
        raise bad_pack(where, problem.found, problem.needed) from None
    return PackedEntry(key, record, artifact)


def _present(layer: Layer, staged: _Staged) -> bool:
    """Whether the cache holds this entry, whole."""
    try:
        entry = read_entry(layer, staged.key, staged.record.toolchain_digest)
        return entry is not None and bool(entry.read_artifact())
    except (EntryError, FileNotFoundError):
        return False


def _is_plan_there(layer: Layer, name: str) -> bool:
    """Whether the cache holds a plan of this name, and it is good."""
    try:
        return bool(PlanFiles().stored(layer, name))
    except (EntryError, PlanError, FileNotFoundError):
        return False


def _refuse_other_runtime(places: Iterable[Path], folder: Path, layer: Layer) -> None:
    """As `merge` does: what is in the cache may need the one that it has."""
    for place in places:
        if place.parts[0] == RUNTIME and _is_there(folder / place, layer.root / place, layer.root) is False:
            raise PackError(
                where=str(layer.root / place),
                found="another runtime library than the pack's, or another licence of it",
                needed="one runtime library",
                remedy="Unpack into a cache of its own, or first remove this folder if nothing needs it any more.",
            )


def _is_there(staged: Path, final: Path, root: Path) -> bool | None:
    """Whether the file that is there has the same content; None where there is no file."""
    try:
        there = final.is_file() and not final.is_symlink()
        return final.read_bytes() == staged.read_bytes() if there else None
    except OSError as problem:
        raise cannot_write(root, problem) from problem


def _write(path: Path, content: bytes, root: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    except OSError as problem:
        raise cannot_write(root, problem) from problem
    return path


def _place_file(staged: Path, place: Path, layer: Layer) -> None:
    """Give a file its place below the root, unless one of equal content has it. Replacing another is said."""
    final = layer.root / place
    there = _is_there(staged, final, layer.root)
    if there:
        return
    if there is False:
        logger.warning("%s differs from the pack's, and is replaced by it.", final)
    try:
        sync(staged, FILE_MODE)
        folder = make_folder(layer.root, place.parent.parts, trusted=layer.trusted)
        try:
            os.replace(staged, final.name, dst_dir_fd=folder)
        finally:
            os.close(folder)
    except EntryError as problem:
        raise cannot_write(layer.root, OSError(f"{problem.where}: {problem.found}")) from problem
    except OSError as problem:
        raise cannot_write(layer.root, problem) from problem
