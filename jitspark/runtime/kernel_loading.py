"""The kernels of a worker: found in the cache or built, loaded, and told in one line.

One lookup and one loader serve the whole process, so that what the backbone has loaded costs the draft nothing. What is
missing while compiling is forbidden is one error that names all of it, before any graph is captured.
"""

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from jitspark.building.build import build_and_load, wanted_for
from jitspark.building.progress import Event
from jitspark.cache.loader import Kernel, Loader
from jitspark.cache.lookup import Lookup
from jitspark.cache.store import Layer
from jitspark.geometry import Deployment
from jitspark.key import Key
from jitspark.plans import executor
from jitspark.plans.plan import Plan
from jitspark.registry import specializations
from jitspark.settings import Settings

logger = logging.getLogger("jitspark")

TELL_SECONDS = 5.0  # between two lines of a cold start


def load_deployment(
    deployment: Deployment,
    target: str,
    settings: Settings,
    warm_command: str,
    tell: Callable[[Event], None] = lambda _: None,
) -> Mapping[Key, Kernel]:
    """All that a worker of this deployment can ask for, compiled where that is needed and allowed.

    The ranks of a node share that work; `tell` hears of it. Raises what `build.build_and_load` raises:
    MissingEntriesError names everything that is missing, and `warm_command`.
    """
    wanted = wanted_for(specializations(deployment), [target])
    lookup, loader = _process_cache(settings)
    teller = _Teller(tell)
    kernels = build_and_load(wanted, lookup, loader, settings, warm_command=warm_command, on_event=teller.hear)
    logger.info("%s", teller.summary(len(kernels)))
    return {item.key: kernel for item, kernel in zip(wanted, kernels, strict=True)}


def load_kernels(plans: Sequence[Plan], settings: Settings, warm_command: str | None = None) -> Mapping[Key, Kernel]:
    """The kernels of `plans`, most of which `load_deployment` has loaded already. Silent, unless it compiles.

    Raises what `executor.load_kernels` raises.
    """
    teller = _Teller()
    lookup, loader = _process_cache(settings)
    kernels = executor.load_kernels(plans, lookup, loader, settings, warm_command=warm_command, on_event=teller.hear)
    logger.log(logging.INFO if teller.compiled else logging.DEBUG, "%s", teller.summary(len(kernels)))
    return kernels


def cache_layers(settings: Settings) -> Sequence[Layer]:
    """The cache's layers, in the order in which they are searched."""
    return _process_cache(settings)[0].roots.layers


@functools.cache
def _process_cache(settings: Settings) -> tuple[Lookup, Loader]:
    return Lookup(settings), Loader(settings)


class _Teller:
    """Counts what is compiled, and says now and then what is compiled or waited for."""

    def __init__(self, tell: Callable[[Event], None] = lambda _: None) -> None:
        self._started = self._last = time.perf_counter()
        self._tell = tell
        self.compiled: set[Key] = set()

    def hear(self, event: Event) -> None:
        self._tell(event)
        if event.kind == "compiled":
            self.compiled.add(event.key)
        now = time.perf_counter()
        if event.kind != "hit" and now - self._last >= TELL_SECONDS:
            self._last = now
            logger.info("kernels: %d of %d; %s", event.done, event.total, _doing(event))

    def summary(self, kernels: int) -> str:
        took = (time.perf_counter() - self._started) * 1e3
        return f"kernels: {kernels - len(self.compiled)} hits, {len(self.compiled)} compiles, {took:.1f} ms"


def _doing(event: Event) -> str:
    """What is compiled or waited for, with its key and who holds it."""
    holder = "" if event.holder is None else f", held by process {event.holder.pid} on {event.holder.node}"
    return f"{event.kind} {event.title} ({event.key}) for {event.seconds:.0f} s{holder}"
