"""The verbs that look after a cache, as typer commands: verify, prune and stats."""

from pathlib import Path
from typing import Annotated

import typer

from cache_tools.command_line import answer, answer_json, errors_as_json
from cache_tools.commands import Json
from jitspark.settings import from_environment


def verify(
    source: Annotated[
        Path | None, typer.Argument(metavar="[PACK|DIR]", help="A pack or a cache directory; else the cache in use.")
    ] = None,
    trust: Annotated[
        list[Path] | None,
        typer.Option("--trust", metavar="KEY.pub", help="Every file must be signed with such a key; repeatable."),
    ] = None,
    rebuild: Annotated[
        str, typer.Option("--rebuild", metavar="N%", help="Compile this share again and compare the bytes.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Read and hash every entry again; exit status 1 if any is bad."""
    from dataclasses import asdict

    from cache_tools.quantities import parse_share
    from cache_tools.signing import trust_in
    from cache_tools.verify_source import source_lines, verify_source

    with errors_as_json(as_json):
        share = parse_share(rebuild, "--rebuild") if rebuild else None
        keys = trust_in(trust, allow_unsigned=False) if trust else None
        result = verify_source(source, keys, share, from_environment())
    if as_json:
        answer_json(asdict(result))
    else:
        for line in source_lines(result):
            answer(line)
    if result.bad:
        raise typer.Exit(1)


def prune(
    max_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Remove the least recently used beyond this, as 2GB.")
    ] = "",
    unused_for: Annotated[
        str, typer.Option(metavar="AGE", help="Remove what was not used for this long, as 30d.")
    ] = "",
    other_toolchains: Annotated[
        bool, typer.Option("--other-toolchains", help="Remove other compilers' entries.")
    ] = False,
    old_layouts: Annotated[bool, typer.Option("--old-layouts", help="Remove folders of earlier layouts.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove entries from the writable cache directory; what plans pin or somebody is building stays."""
    from cache_tools.prune import Rules, pruned_json, pruned_lines
    from cache_tools.prune import prune as prune_layer
    from cache_tools.quantities import parse_age, parse_size
    from cache_tools.roots import readable_layers, writable_layer

    with errors_as_json(as_json):
        settings = from_environment()
        size = parse_size(max_size, "--max-size") if max_size else None
        age = parse_age(unused_for, "--unused-for") if unused_for else None
        rules = Rules(size, age, other_toolchains, old_layouts, dry_run)
        result = prune_layer(writable_layer(settings), rules, settings, readable_layers(settings))
    if as_json:
        answer_json(pruned_json(result))
        return
    for line in pruned_lines(result):
        answer(line)


def stats(as_json: Json = False) -> None:
    """Entries, bytes, hits, misses, waits and compile times, per kernel and layer."""
    from cache_tools.roots import readable_layers
    from cache_tools.stats import stats as stats_of
    from cache_tools.stats import stats_json, stats_lines

    with errors_as_json(as_json):
        rows = stats_of(readable_layers(from_environment()))
    if as_json:
        answer_json(stats_json(rows))
        return
    for line in stats_lines(rows):
        answer(line)
