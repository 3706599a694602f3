"""The plans that `jitspark warm` stores beside the entries that they name."""

from collections.abc import Iterator
from dataclasses import dataclass

from cache_tools.roots import readable_layers, writable_layer
from jitspark.cache.store import Layer
from jitspark.cli.selection import Selection
from jitspark.errors import CacheDirectoryError
from jitspark.plans.planning import Plans, Served
from jitspark.plans.request import PlanRequest
from jitspark.plans.store import keep
from jitspark.settings import Settings


@dataclass(frozen=True, slots=True)
class PlanCounts:
    """Plans that were made and stored, plans that were there, and plans that could not be stored."""

    made: int = 0
    found: int = 0
    missing: int = 0

    def line(self) -> str:
        """For people."""
        lacking = f", {self.missing} missing: the cache directory cannot be written to" if self.missing else ""
        return f"{self.made + self.found + self.missing} plans, {self.made} made, {self.found} there{lacking}"


def deployments(selection: Selection) -> Iterator[Served]:
    """The deployments of a selection, with our kernels in every part."""
    return (Served(selection.geometry, tp, target, {}) for tp in selection.tp for target in selection.targets)


def warm_plans(selection: Selection, settings: Settings) -> PlanCounts | None:
    """Store the plans of these deployments that no layer has; None for a selection of kernels, which has none.

    Raises CacheDirectoryError when one cannot be written, PlanError for one that does not make sense.
    """
    if selection.kernels:
        return None
    writable = _writable(settings)  # which makes its root
    layers = readable_layers(settings)
    found = [0, 0, 0]
    for served in deployments(selection):
        plans = Plans(served, layers)
        for request in served.requests():
            found[_settle(plans, request, writable)] += 1
    return PlanCounts(*found)


def _settle(plans: Plans, request: PlanRequest, writable: Layer | None) -> int:
    """Make the plan if it is not there and can be stored: 0, 1, 2 for made, there, missing."""
    if plans.has(request):
        if writable is not None:
            keep(writable, request)
        return 1
    if writable is None:
        return 2
    plans.make(request)
    return 0


def _writable(settings: Settings) -> Layer | None:
    try:
        return writable_layer(settings)
    except CacheDirectoryError:  # said already if anything had to be compiled
        return None
