"""`explain KEY`: everything that went into a key, and what its entries are."""

from collections.abc import Iterator, Sequence
from typing import Any

from cache_tools.difference import leaves, shown
from cache_tools.entries import compiler_version
from jitspark.cache.store import Entry


def parts(entries: Sequence[Entry]) -> Iterator[str]:
    """The lines for people: the recipe that all `entries` share, then each entry."""
    key = entries[0].key
    yield f"{key.kernel} for {key.target} on {key.host}"
    yield f"recipe {key.recipe}"
    for field, value in leaves(entries[0].record.recipe):
        yield f"  {field}: {shown(value)}"
    for entry in entries:
        yield f"entry {entry.where}"
        record = entry.record
        yield f"  compiler {compiler_version(record)}, toolchain {entry.toolchain}"
        for field, value in leaves(record.toolchain):
            yield f"    {field}: {shown(value)}"
        yield f"  artifact: {record.size} bytes, sha256 {record.sha256}"
        yield f"  signature: {shown(record.signature)}"
        yield f"  needs: the {record.runtime} runtime library, {', '.join(record.needs)}"


def parts_json(entries: Sequence[Entry]) -> dict[str, Any]:
    """The same as one JSON object."""
    key = entries[0].key
    return {
        "kernel": key.kernel,
        "target": key.target,
        "host": key.host,
        "recipe_digest": key.recipe,
        "recipe": entries[0].record.recipe,
        "entries": [_entry(entry) for entry in entries],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    record = entry.record
    return {
        "where": entry.where,
        "toolchain_digest": entry.toolchain,
        "toolchain": record.toolchain,
        "sha256": record.sha256,
        "bytes": record.size,
        "symbol": record.symbol,
        "signature": record.signature,
        "needs": list(record.needs),
        "runtime": record.runtime,
    }
