"""Aligned columns of text. No colours and no wrapping: the output is read by people and by other programs."""

from collections.abc import Iterator, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    """The lines of a table; numbers are right-aligned."""
    numeric = [bool(rows) and all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(header))]
    texts = [list(header), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(header))]
    for row in texts:
        cells = zip(row, widths, numeric, strict=True)
        yield "  ".join(text.rjust(width) if right else text.ljust(width) for text, width, right in cells).rstrip()


def _text(cell: object) -> str:
    return f"{cell:.2f}" if isinstance(cell, float) else str(cell)
