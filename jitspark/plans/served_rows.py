"""Which of vLLM's CUDA graph sizes a step of ours serves, and why the others run stock."""

from collections.abc import Iterable
from dataclasses import dataclass

MAX_REQUESTS = 8  # as many as plans are made for


@dataclass(frozen=True, slots=True)
class ServedRows:
    """The rows of the decode steps that are served, and the capture sizes that run stock, with the reason for each."""

    rows: tuple[int, ...]
    stock: tuple[tuple[int, str], ...]

    def line(self) -> str | None:
        """One line that names the sizes that run stock, reason by reason; None when every size is served."""
        reasons = dict.fromkeys(why for _, why in self.stock)
        told = (f"{_sizes([size for size, each in self.stock if each == why])} ({why})" for why in reasons)
        return f"capture sizes that run stock: {'; '.join(told)}" if self.stock else None


def served_rows(capture_sizes: Iterable[int], query_length: int, max_num_seqs: int) -> ServedRows:
    """What becomes of these capture sizes.

    vLLM rounds the size of a full decode graph up to whole requests of `query_length` tokens, captures no size twice,
    none with more requests than `max_num_seqs`, and none above its largest size.
    """
    sizes = sorted(set(capture_sizes))
    largest = max(sizes, default=0)
    rows: list[int] = []
    stock: list[tuple[int, str]] = []
    for size in sizes:
        rounded = -(-size // query_length) * query_length
        why = _reason(size, rounded, largest, query_length, max_num_seqs)
        if why is not None:
            stock.append((size, why))
        elif rounded not in rows:
            rows.append(rounded)
    return ServedRows(tuple(rows), tuple(stock))


def _reason(size: int, rounded: int, largest: int, query_length: int, max_num_seqs: int) -> str | None:
    requests = rounded // query_length
    if size < 1:
        return "no rows"
    if rounded > largest:
        return f"{rounded} rows are more than the largest size: vLLM captures no such decode graph"
    if requests > max_num_seqs:
        return f"more than the {max_num_seqs} requests of max_num_seqs"
    if requests > MAX_REQUESTS:
        return f"more than {MAX_REQUESTS} requests of {query_length} tokens"
    return None


def _sizes(sizes: list[int]) -> str:
    shown = ", ".join(map(str, sizes[:6]))
    return shown if len(sizes) <= 6 else f"{shown}, ... {sizes[-1]} ({len(sizes)} sizes)"
