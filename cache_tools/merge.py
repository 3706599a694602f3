"""`merge`: several packs or caches into one pack, the very bytes that packing all their entries at once would give."""

from collections.abc import Sequence
from pathlib import Path

from cache_tools.contents import Runtime
from cache_tools.pack import Form, Packed, pack
from cache_tools.plan_files import served_by
from cache_tools.signing import Trust
from cache_tools.sources import Source, read_source
from jitspark.errors import PackError
from jitspark.settings import Settings


def merge(path: Path, sources: Sequence[Path], trust: Trust, form: Form, settings: Settings) -> Packed:
    """Write `path` with every entry of `sources`, the plans that these serve, and a runtime library if one carries it.

    Raises PackError for a source that is bad or not covered by `trust`, and when two of them hold different bytes
    for one key and toolchain, or one plan, or different runtime libraries.
    """
    read = [read_source(source, trust, settings) for source in sources]
    entries = [entry for source in read for entry in source.entries]
    plans = served_by((plan for source in read for plan in source.plans), {entry.key for entry in entries})
    return pack(path, entries, _runtime(read), form, plans)


def _runtime(sources: Sequence[Source]) -> Runtime | None:
    carrying = [source for source in sources if source.runtime is not None]
    for source in carrying:
        if source.runtime != carrying[0].runtime:
            raise PackError(
                where=str(source.path),
                found=f"another runtime library than in {carrying[0].path}",
                needed="one runtime library",
                remedy="Merge packs that were built against one release of nvidia-cutlass-dsl.",
            )
    return carrying[0].runtime if carrying else None
