"""`pack --tp`: exactly the entries that deployments ask for, none missing."""

import re
from pathlib import Path

from cache_tools.entries import entries_of
from cache_tools.roots import readable_layers
from jitspark.build import missing_entries
from jitspark.cli.selection import Selection, wanted_by
from jitspark.settings import Settings
from jitspark.store import Entry


def deployment_entries(selection: Selection, settings: Settings) -> list[Entry]:
    """The entries to pack. Raises MissingEntriesError when the cache lacks one."""
    layers = readable_layers(settings)
    keys = [item.key for item in wanted_by(selection)]
    found = {key: entries_of(key, layers) for key in keys}
    missing = [key for key in keys if not found[key]]
    if missing:
        remedy = f"Run `{selection.warm_command()}` first."
        raise missing_entries(missing, needed="an entry for every key", remedy=remedy)
    return [entry for key in keys for entry in found[key]]


def wheel_name(selection: Selection) -> str:
    """What a wheel of this selection is called, after `jitspark_cache_`: `<geometry>_<target>_tp<N>`."""
    geometry = re.sub(r"[^a-z0-9]+", "_", Path(selection.geometry).stem.lower()).strip("_")
    return "_".join([geometry, *selection.targets, "tp" + "_".join(map(str, selection.tp))])
