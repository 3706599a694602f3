"""The verbs that carry caches to other machines, as typer commands: pack, unpack, merge and diff."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from cache_tools.command_line import answer, answer_json, errors_as_json
from cache_tools.commands import Json
from jitspark.settings import Settings, from_environment
from jitspark.store import Entry

PackFile = Annotated[Path, typer.Argument(metavar="FILE", help="The pack's file, or a directory for other formats.")]
Targets = Annotated[str, typer.Option("--target", metavar="T[,T]", help="Only entries for these targets.")]
WithRuntime = Annotated[
    bool, typer.Option("--with-runtime", help="Carry the CuTe DSL runtime library and its licence too.")
]
Format = Annotated[str, typer.Option("--format", metavar="tar.zst|dir|oci|wheel", help="What to make.")]
Name = Annotated[str, typer.Option("--name", metavar="NAME", help="A wheel's: <geometry>_<target>_tp<N>.")]
Sign = Annotated[Path | None, typer.Option("--sign", metavar="KEY", help="Sign with this Ed25519 private key (PEM).")]
TrustKeys = Annotated[
    list[Path] | None,
    typer.Option("--trust", metavar="KEY.pub", help="Accept what this Ed25519 public key signed; repeatable."),
]
AllowUnsigned = Annotated[
    bool, typer.Option("--allow-unsigned", help="Accept packs whose signature nobody checks: their code will run here.")
]
OtherMachine = Annotated[
    bool, typer.Option("--other-machine", help="Unpack entries for another host or other GPUs than this machine's.")
]


def pack(
    file: PackFile,
    target: Targets = "",
    with_runtime: WithRuntime = False,
    form: Format = "tar.zst",
    name: Name = "",
    sign: Sign = None,
    as_json: Json = False,
) -> None:
    """Put the cache's entries into one file, or a directory, image layout or wheel."""
    from cache_tools.entries import entries_in
    from cache_tools.pack import Form
    from cache_tools.roots import readable_layers

    with errors_as_json(as_json):
        settings = from_environment()
        chosen = target.split(",") if target else []
        found = entries_in(readable_layers(settings))
        entries = [entry for entry in found if not chosen or entry.key.target in chosen]
        write_pack(file, entries, settings, Form(form, name, sign), with_runtime=with_runtime, as_json=as_json)


def write_pack(
    file: Path, entries: Sequence[Entry], settings: Settings, form: Any, *, with_runtime: bool, as_json: bool
) -> None:
    """Write the pack and say what it is; `form` is a `cache_tools.pack.Form`."""
    from cache_tools.pack import pack as pack_entries

    runtime = None
    if with_runtime:
        from cache_tools.runtime_carried import runtime_to_carry

        runtime = runtime_to_carry(settings)
    tell_packed(pack_entries(file, entries, runtime, form), as_json=as_json)


def tell_packed(packed: Any, *, as_json: bool) -> None:
    """Say what a `cache_tools.pack.Packed` is."""
    if as_json:
        answer_json({**asdict(packed), "path": str(packed.path)})
        return
    digest = f", sha256 {packed.sha256}" if packed.sha256 else ""
    signed = f", signed with the key {packed.signer[:16]}" if packed.signer else ", not signed"
    answer(f"{packed.path}: {packed.entries} entries, {packed.size} bytes{digest}")
    answer(f"merkle root {packed.merkle_root}{signed}")


def unpack(
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    trust: TrustKeys = None,
    allow_unsigned: AllowUnsigned = False,
    other_machine: OtherMachine = False,
    as_json: Json = False,
) -> None:
    """Put a pack's entries into the writable cache directory, each verified, and say what they need."""
    from cache_tools.machine import needs_here, refuse_elsewhere
    from cache_tools.roots import writable_layer
    from cache_tools.signing import trust_in
    from cache_tools.unpack import unpack as unpack_file

    with errors_as_json(as_json):
        settings = from_environment()
        trusted = trust_in(trust or (), allow_unsigned=allow_unsigned)
        layer = writable_layer(settings)
        accept = (lambda _: None) if other_machine else (lambda needs: refuse_elsewhere(needs, str(file)))
        done = unpack_file(file, layer, trusted, accept)
        needs = list(needs_here(done.needs, settings))
    if as_json:
        answer_json({**asdict(done), "root": str(layer.root), "machine": [asdict(need) for need in needs]})
        return
    signed = f"; signed with the key {done.signer[:16]}" if done.signer else "; no signature was checked"
    answer(f"{file}: {done.new} entries unpacked into {layer.root}, {done.kept} were there already{signed}")
    for need in needs:
        answer(str(need))


def merge(
    file: PackFile,
    sources: Annotated[list[Path], typer.Argument(metavar="PACK|DIR...", help="What to merge.")],
    trust: TrustKeys = None,
    allow_unsigned: AllowUnsigned = False,
    form: Format = "tar.zst",
    name: Name = "",
    sign: Sign = None,
    as_json: Json = False,
) -> None:
    """Put the entries of several packs or cache directories into one pack."""
    from cache_tools.merge import merge as merge_sources
    from cache_tools.pack import Form
    from cache_tools.signing import trust_in

    with errors_as_json(as_json):
        trusted = trust_in(trust or (), allow_unsigned=allow_unsigned)
        packed = merge_sources(file, sources, trusted, Form(form, name, sign), from_environment())
        tell_packed(packed, as_json=as_json)


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A cache directory or a pack.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: Json = False,
) -> None:
    """What two caches or packs do not share; exit status 1 if there is anything."""
    from cache_tools.cache_difference import cache_difference, difference_json, difference_lines
    from cache_tools.signing import ANY
    from cache_tools.sources import read_source

    with errors_as_json(as_json):
        settings = from_environment()
        a, b = (read_source(path, ANY, settings).entries for path in (first, second))
        result = cache_difference(a, b)
    if as_json:
        answer_json(difference_json(result))
    else:
        for line in difference_lines(result, str(first), str(second)):
            answer(line)
    if not result.equal:
        raise typer.Exit(1)
