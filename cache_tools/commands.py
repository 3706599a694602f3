"""The verbs as typer commands. What each does is in the module of its name."""

from pathlib import Path
from typing import Annotated

import typer

from cache_tools.command_line import answer, answer_json, errors_as_json
from jitspark.settings import Settings, from_environment
from jitspark.store import Entry

Json = Annotated[bool, typer.Option("--json", help="Answer with one JSON object.")]
PackFile = Annotated[Path, typer.Argument(metavar="FILE.tar")]
Targets = Annotated[str, typer.Option("--target", metavar="T[,T]", help="Only entries for these targets.")]
WithRuntime = Annotated[bool, typer.Option("--with-runtime", help="Carry the CuTe DSL runtime library too.")]


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


def pack(file: PackFile, target: Targets = "", with_runtime: WithRuntime = False) -> None:
    """Put the cache's entries into one tar file."""
    from cache_tools.entries import entries_in
    from cache_tools.roots import readable_layers

    settings = from_environment()
    chosen = target.split(",") if target else []
    entries = entries_in(readable_layers(settings))
    write_pack(file, [e for e in entries if not chosen or e.key.target in chosen], settings, with_runtime=with_runtime)


def unpack(file: PackFile) -> None:
    """Put a pack's entries into the writable cache directory, each verified."""
    from cache_tools.roots import writable_layer
    from cache_tools.unpack import unpack as unpack_file

    layer = writable_layer(from_environment())
    done = unpack_file(file, layer)
    answer(f"{file}: {done.new} entries unpacked into {layer.root}, {done.kept} were there already")


def write_pack(file: Path, entries: list[Entry], settings: Settings, *, with_runtime: bool) -> None:
    """Write the pack and say what it is."""
    from cache_tools.pack import pack as pack_entries
    from jitspark.runtime_library import find_runtime_library

    library = find_runtime_library(settings) if with_runtime else None
    packed = pack_entries(file, entries, None if library is None else (library.flavour, library.path))
    answer(f"{file}: {packed.entries} entries, {packed.size} bytes, sha256 {packed.sha256}")
