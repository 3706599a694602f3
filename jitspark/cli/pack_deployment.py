"""`pack --tp`: exactly the entries and plans that deployments ask for, none missing."""

import re
from pathlib import Path

from cache_tools.entries import entries_of
from cache_tools.plan_files import PlanFile, plans_in
from cache_tools.roots import readable_layers
from cache_tools.shipping import Chosen
from jitspark.building.build import missing_entries
from jitspark.cache.store import Entry, Layer
from jitspark.cli.selection import Selection, wanted_by
from jitspark.cli.warm_plans import deployments
from jitspark.plans.store import missing_plans
from jitspark.settings import Settings


def of_deployments(selection: Selection, settings: Settings) -> Chosen:
    """What to pack. Raises MissingEntriesError or PlanError when the cache lacks something."""
    layers = readable_layers(settings)
    return Chosen(_entries(selection, layers), _plans(selection, layers), wheel_name(selection))


def _entries(selection: Selection, layers: tuple[Layer, ...]) -> list[Entry]:
    keys = [item.key for item in wanted_by(selection)]
    found = {key: entries_of(key, layers) for key in keys}
    missing = [key for key in keys if not found[key]]
    if missing:
        remedy = f"Run `{selection.warm_command()}` first."
        raise missing_entries(missing, needed="an entry for every key", remedy=remedy)
    return [entry for key in keys for entry in found[key]]


def _plans(selection: Selection, layers: tuple[Layer, ...]) -> list[PlanFile]:
    wanted = {request.digest: request for served in deployments(selection) for request in served.requests()}
    found = [each for each in plans_in(layers) if each.name in wanted]
    missing = [request.title() for name, request in wanted.items() if name not in {each.name for each in found}]
    if missing:
        remedy = f"Run `{selection.warm_command()}` first."
        raise missing_plans(missing, needed="every plan of these deployments", remedy=remedy)
    return found


def wheel_name(selection: Selection) -> str:
    """What a wheel of this selection is called, after `jitspark_cache_`: `<geometry>_<target>_tp<N>`."""
    geometry = re.sub(r"[^a-z0-9]+", "_", Path(selection.geometry).stem.lower()).strip("_")
    return "_".join([geometry, *selection.targets, "tp" + "_".join(map(str, selection.tp))])
