"""`pack --tp`: exactly the entries that deployments ask for, none missing."""

from pathlib import Path

from cache_tools.commands import write_pack
from cache_tools.entries import entries_of
from cache_tools.roots import readable_layers
from jitspark.build import missing_entries
from jitspark.cli.selection import Selection, wanted_by
from jitspark.settings import Settings


def pack_deployment(file: Path, selection: Selection, settings: Settings, *, with_runtime: bool) -> None:
    """Write the pack. Raises MissingEntriesError when the cache lacks an entry."""
    layers = readable_layers(settings)
    keys = [item.key for item in wanted_by(selection)]
    found = {key: entries_of(key, layers) for key in keys}
    missing = [key for key in keys if not found[key]]
    if missing:
        remedy = f"Run `{selection.warm_command()}` first."
        raise missing_entries(missing, needed="an entry for every key", remedy=remedy)
    write_pack(file, [entry for key in keys for entry in found[key]], settings, with_runtime=with_runtime)
