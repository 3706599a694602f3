"""The kernels of a worker: found in the cache or built, loaded, and told in one line.

One lookup and one loader serve the whole process, so that what the backbone has loaded costs the draft nothing. What is
missing while compiling is forbidden is one error that names all of it, before any graph is captured.
"""

import functools
import logging
import time
from collections.abc import Mapping, Sequence

from jitspark import executor
from jitspark.key import Key
from jitspark.loader import Kernel, Loader
from jitspark.lookup import Lookup
from jitspark.plan import Plan
from jitspark.progress import Event
from jitspark.settings import Settings

logger = logging.getLogger("jitspark")

TELL_SECONDS = 5.0  # between two lines of a cold start


def load_kernels(plans: Sequence[Plan], settings: Settings, warm_command: str | None = None) -> Mapping[Key, Kernel]:
    """The kernels of `plans`, compiled where that is needed and allowed; the ranks of a node share that work.

    Raises what `executor.load_kernels` raises: MissingEntriesError names everything that is missing and `warm_command`.
    """
    teller = _Teller()
    lookup, loader = _process_cache(settings)
    kernels = executor.load_kernels(plans, lookup, loader, settings, warm_command=warm_command, on_event=teller.hear)
    logger.info("%s", teller.summary(len(kernels)))
    return kernels


@functools.cache
def _process_cache(settings: Settings) -> tuple[Lookup, Loader]:
    return Lookup(settings), Loader(settings)


class _Teller:
    """Counts what is compiled, and says now and then what is compiled or waited for."""

    def __init__(self) -> None:
        self._started = self._last = time.perf_counter()
        self._compiled: set[Key] = set()

    def hear(self, event: Event) -> None:
        if event.kind == "compiled":
            self._compiled.add(event.key)
        now = time.perf_counter()
        if event.kind != "hit" and now - self._last >= TELL_SECONDS:
            self._last = now
            logger.info("kernels: %d of %d missing ones; %s", event.done, event.total, _doing(event))

    def summary(self, kernels: int) -> str:
        took = (time.perf_counter() - self._started) * 1e3
        return f"kernels: {kernels - len(self._compiled)} hits, {len(self._compiled)} compiles, {took:.1f} ms"


def _doing(event: Event) -> str:
    """What is compiled or waited for, with its key and who holds it."""
    holder = "" if event.holder is None else f", held by process {event.holder.pid} on {event.holder.node}"
    return f"{event.kind} {event.title} ({event.key}) for {event.seconds:.0f} s{holder}"
