"""`verify` of the cache in use, of a directory or of a pack: hashes, then signatures, then a sample compiled again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cache_tools.entries import entries_in
from cache_tools.opened import opened_pack
from cache_tools.plan_files import PlanFile
from cache_tools.roots import readable_layers, readable_root
from cache_tools.signed_layers import unsigned_files
from cache_tools.signing import ANY, Trust
from cache_tools.sources import read_source
from cache_tools.unpack import PackedEntry, packed_items
from cache_tools.verify import Bad, Verified, verified_lines, verify
from jitspark.cache.store import Entry
from jitspark.settings import Settings


@dataclass(frozen=True, slots=True)
class VerifiedSource:
    """As `Verified`. `signed` says whether signatures were checked, `rebuilt` how many entries came out the same.

    `skipped` counts the sampled entries that could not be compared, with the reasons.
    """

    entries: int
    plans: int
    size: int
    bad: tuple[Bad, ...]
    signed: bool
    rebuilt: int | None
    skipped: tuple[Bad, ...]


def verify_source(source: Path | None, trust: Trust | None, share: float | None, settings: Settings) -> VerifiedSource:
    """Verify the cache in use, or `source`; with `trust` every file must be signed, with `share` some are rebuilt.

    Raises PackError for a bad pack: of it nothing is known but the first thing that is wrong.
    """
    if source is not None and not source.is_dir():
        hashed, unsigned = _read_through(source, trust or ANY), []
        entries: Sequence[Entry] = read_source(source, trust or ANY, settings).entries if share else ()
    else:
        layers = readable_layers(settings) if source is None else (readable_root(source, settings),)
        hashed, unsigned = verify(layers), list(unsigned_files(layers, trust)) if trust else []
        entries = list(entries_in(layers)) if share else ()
    different, skipped, same = _rebuilt(entries, share, settings) if share else ((), (), None)
    bad = (*hashed.bad, *unsigned, *different)
    return VerifiedSource(hashed.entries, hashed.plans, hashed.size, bad, trust is not None, same, skipped)


def _read_through(file: Path, trust: Trust) -> Verified:
    """A pack, entry by entry, so that it need not fit into memory. Raises PackError at the first thing amiss."""
    with opened_pack(file, trust) as pack:
        sizes, plans = [], 0
        for item in packed_items(pack, str(file)):
            sizes += [item.record.size] if isinstance(item, PackedEntry) else []
            plans += isinstance(item, PlanFile)
    return Verified(len(sizes), plans, sum(sizes), ())


def _rebuilt(
    entries: Sequence[Entry], share: float, settings: Settings
) -> tuple[tuple[Bad, ...], tuple[Bad, ...], int]:
    from jitspark.building.rebuild import rebuild, sample

    result = rebuild(sample(entries, share), settings)
    different = tuple(Bad(_name(entry), f"not what compiling gives: {why}") for entry, why in result.different)
    return different, tuple(Bad(_name(entry), why) for entry, why in result.skipped), len(result.same)


def _name(entry: Entry) -> str:
    return str(entry.key) if entry.layer is None else entry.where


def source_lines(result: VerifiedSource) -> Iterator[str]:
    """The result for people."""
    yield from (f"not compared: {each.where}: {each.found}" for each in result.skipped)
    yield from verified_lines(Verified(result.entries, result.plans, result.size, result.bad))
    if result.signed and result.bad:
        yield "not all is as it was signed"
    elif result.signed:
        found = result.entries or result.plans
        yield "every file is signed with a key that --trust names" if found else "nothing is here that could be signed"
    if result.rebuilt is not None:
        yield f"{result.rebuilt} entries compiled again to the same bytes, {len(result.skipped)} not compared"
