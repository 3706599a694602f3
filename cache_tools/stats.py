"""`stats`: what the cache holds and how it served, per kernel and layer, from the store and the ledger."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cache_tools.entries import entries_in
from cache_tools.table import table
from jitspark.cache.ledger import lines
from jitspark.cache.store import Layer

_COLUMNS = ("entries", "bytes", "hits", "misses", "waits", "compiles", "compile_seconds")


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel in one layer. Entries and bytes are there now; the rest is what the ledger counted."""

    kernel: str
    layer: str
    entries: int
    bytes: int
    hits: int
    misses: int
    waits: int
    compiles: int
    compile_seconds: float


def stats(layers: Sequence[Layer]) -> tuple[Row, ...]:
    """A row for each kernel and layer, sorted. Without a ledger the counts are zero."""
    counts: dict[tuple[str, str], list[int]] = {}

    def add(kernel: str, layer: str, *numbers: int) -> None:
        row = counts.setdefault((kernel, layer), [0] * len(_COLUMNS))
        row[:] = [old + new for old, new in zip(row, numbers, strict=True)]

    for entry in entries_in(layers):
        add(entry.key.kernel, str(entry.layer.root if entry.layer else ""), 1, entry.record.size, 0, 0, 0, 0, 0)
    for line in (line for layer in layers if layer.writable for line in lines(layer)):
        kernel = line.entry.split("/")[1] if line.entry.count("/") == 3 else "unknown"
        add(kernel, line.layer, 0, 0, line.hits, line.misses, line.waits, line.compiles, line.compile_ms)
    return tuple(_row(kernel, layer, numbers) for (kernel, layer), numbers in sorted(counts.items()))


def _row(kernel: str, layer: str, numbers: list[int]) -> Row:
    entries, size, hits, misses, waits, compiles, compile_ms = numbers
    return Row(kernel, layer, entries, size, hits, misses, waits, compiles, compile_ms / 1000)


def stats_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The rows for people."""
    header = ("kernel", "layer", *_COLUMNS)
    yield from table(header, [[getattr(row, name) for name in header] for row in rows])


def stats_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows as one JSON object."""
    return {"rows": [asdict(row) for row in rows]}
