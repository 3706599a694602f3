"""Caches that a command line names: a directory is a root to read, a file is a pack, read into memory."""

from dataclasses import dataclass
from pathlib import Path

from cache_tools.archive import LICENCE, RUNTIME_LIBRARY
from cache_tools.contents import Runtime
from cache_tools.entries import entries_in
from cache_tools.opened import opened_pack
from cache_tools.plan_files import PlanFile, plans_in
from cache_tools.roots import readable_root
from cache_tools.runtime_carried import carried_runtime
from cache_tools.signing import Trust
from cache_tools.unpack import PackedEntry, packed_items
from jitspark.cache.runtime_library import RUNTIME
from jitspark.cache.store import Entry
from jitspark.settings import Settings
from jitspark.target import CUDA_FLAVOUR


@dataclass(frozen=True, slots=True)
class Source:
    """What a cache holds: entries with good records (a pack's whole, in memory), good plans, and a runtime library."""

    path: Path
    entries: tuple[Entry, ...]
    plans: tuple[PlanFile, ...]
    runtime: Runtime | None


def read_source(path: Path, trust: Trust, settings: Settings) -> Source:
    """What lies at `path`. Raises PackError for a bad pack, CacheDirectoryError for an unsafe directory."""
    if not path.is_dir():
        return _read_pack(path, trust)
    layer = readable_root(path, settings)
    return Source(path, tuple(entries_in([layer])), tuple(plans_in([layer])), carried_runtime(layer))


def _read_pack(path: Path, trust: Trust) -> Source:
    entries: list[Entry] = []
    plans: list[PlanFile] = []
    carried: dict[str, bytes] = {}
    with opened_pack(path, trust) as pack:
        for item in packed_items(pack, str(path)):
            if isinstance(item, PackedEntry):
                record = item.record
                entries.append(Entry(None, item.key, record.toolchain_digest, record, item.artifact))
            elif isinstance(item, PlanFile):
                plans.append(item)
            else:
                carried[item[0]] = item[1]
    library = carried.get(f"{RUNTIME}/{CUDA_FLAVOUR}/{RUNTIME_LIBRARY}")
    licence = carried.get(f"{RUNTIME}/{CUDA_FLAVOUR}/{LICENCE}", b"")
    runtime = None if library is None else Runtime(CUDA_FLAVOUR, library, licence)
    return Source(path, tuple(entries), tuple(plans), runtime)
