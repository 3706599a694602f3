"""How a build's progress is shown: a bar with an estimate on a terminal, plain lines elsewhere."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cache_tools.command_line import say
from jitspark.building.progress import Event

# News comes every two seconds; nobody waits longer than five for a line.
LINE_SECONDS = 3.0
# The bar, the count, the time and the estimate: what a line leaves for the rest.
OTHER_COLUMNS = 62


class Estimate:
    """How long the rest takes, from the keys settled since the first compile: earlier ones were hits at no cost."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start: tuple[float, int] | None = None

    def seconds_left(self, event: Event) -> float | None:
        """None while nothing is known."""
        now = self._clock()
        if event.kind == "hit" and self._start is None:
            return None
        if self._start is None:
            self._start = (now - event.seconds, event.done - (event.kind in ("compiled", "failed")))
        began, done_before = self._start
        settled = event.done - done_before
        return (now - began) / settled * (event.total - event.done) if settled else None


@contextmanager
def shown_progress() -> Iterator[Callable[[Event], None]]:
    """A callback for events, shown on standard error in the way that suits it."""
    if not sys.stderr.isatty():
        yield PlainLines().show
        return
    with bar() as show:
        yield show


class PlainLines:
    """A line for each compile, and one every few seconds while nothing is settled."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, write: Callable[[str], None] = say) -> None:
        self._clock = clock
        self._write = write
        self._estimate = Estimate(clock)
        self._last = clock()

    def show(self, event: Event) -> None:
        left = _left(self._estimate.seconds_left(event))
        recent = event.kind not in ("compiled", "failed") and self._clock() - self._last < LINE_SECONDS
        if recent or _ours(event):
            return
        self._last = self._clock()
        self._write(f"[{event.done}/{event.total}] {describe(event)}{left and f', {left}'}")


def describe(event: Event) -> str:
    """What is going on, for which key, since when, and by whom."""
    text = f"{event.kind} {event.title}"
    if event.kind == "hit":
        return f"found {event.title}"
    if event.kind == "failed":
        return text
    if event.kind == "waiting":
        holder = event.holder
        who = f"process {holder.pid} on {holder.node} ({holder.what})" if holder else "another process"
        return f"waiting for {event.key}, held by {who}, for {event.seconds:.0f} s"
    return f"{text} ({event.key}) {event.seconds:.1f} s"


@contextmanager
def bar() -> Iterator[Callable[[Event], None]]:
    """A progress bar; everything else that is printed meanwhile appears above it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    left = TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True))
    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), left, text)
    estimate, console = Estimate(), Console(stderr=True)
    with Progress(*columns, console=console, redirect_stdout=False) as progress:
        task = progress.add_task("looking up", total=None, left="")

        def show(event: Event) -> None:
            if not _ours(event):
                text = describe(event)[: max(0, console.width - OTHER_COLUMNS)]
                seconds = _left(estimate.seconds_left(event))
                progress.update(task, total=event.total, completed=event.done, description=text, left=seconds)

        yield show


def _ours(event: Event) -> bool:
    """Whether this tells that a key waits for ourselves: the compile that it waits for is told too."""
    return event.kind == "waiting" and event.holder is not None and event.holder.pid == os.getpid()


def _left(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"about {f'{minutes} min ' if minutes else ''}{rest} s left"
