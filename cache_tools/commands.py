"""The verbs that look at a cache, as typer commands. What each does is in the module of its name."""

from typing import Annotated

import typer

from cache_tools.command_line import answer, answer_json, errors_as_json
from jitspark.settings import from_environment

Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]


def ls(
    as_json: Json = False,
    one_by_one: Annotated[bool, typer.Option("--entries", help="Every entry, with its key.")] = False,
) -> None:
    """What the cache holds."""
    from cache_tools.entries import entries_in
    from cache_tools.listing import listing, listing_json
    from cache_tools.roots import readable_layers

    with errors_as_json(as_json):
        layers = readable_layers(from_environment())
        entries = list(entries_in(layers))
    if as_json:
        answer_json(listing_json(entries, layers))
        return
    for line in listing(entries, layers, one_by_one=one_by_one):
        answer(line)


def explain(key: Annotated[str, typer.Argument(metavar="KEY")], as_json: Json = False) -> None:
    """What went into a key: the start of its digest, or an entry's path."""
    from cache_tools.entries import entries_named
    from cache_tools.parts import parts, parts_json
    from cache_tools.roots import readable_layers

    with errors_as_json(as_json):
        entries = entries_named(key, readable_layers(from_environment()))
    if as_json:
        answer_json(parts_json(entries))
        return
    for line in parts(entries):
        answer(line)
