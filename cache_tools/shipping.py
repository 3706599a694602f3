"""The verbs that carry caches to other machines, as typer commands: pack, unpack, merge and diff."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cache_tools.command_line import answer, answer_json, errors_as_json
from cache_tools.commands import Json
from jitspark.cache.store import Entry
from jitspark.settings import Settings, from_environment

if TYPE_CHECKING:
    from cache_tools.plan_files import PlanFile

PackFile = Annotated[Path, typer.Argument(metavar="FILE", help="The pack's file, or a directory for other formats.")]
Targets = Annotated[str, typer.Option("--target", metavar="T[,T]", help="Only entries for these targets.")]
WithRuntime = Annotated[
    bool, typer.Option("--with-runtime", help="Carry the CuTe DSL runtime library and its licence too.")
]
Format = Annotated[str, typer.Option("--format", metavar="tar.zst|dir|oci|wheel", help="What to make.")]
Rows = Annotated[
    str, typer.Option("--m", metavar="M[,M]", help="Only what decode steps of so many rows need: their plans' entries.")
]
PlanNames = Annotated[
    list[str] | None,
    typer.Option(
        "--plan", metavar="DIGEST", help="Only this plan (the start of its name) and its entries; repeatable."
    ),
]
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


@dataclass(frozen=True, slots=True)
class Chosen:
    """What is to be packed, and what a wheel of it is called where nobody says."""

    entries: Sequence[Entry]
    plans: "Sequence[PlanFile]"
    name: str = ""


def everything(settings: Settings, target: Targets = "") -> Chosen:
    """All entries of these targets, and every plan that is served by them."""
    from cache_tools.entries import entries_in
    from cache_tools.plan_files import plans_in, served_by
    from cache_tools.roots import readable_layers

    layers, targets = readable_layers(settings), target.split(",") if target else []
    entries = [entry for entry in entries_in(layers) if not targets or entry.key.target in targets]
    return Chosen(entries, served_by(plans_in(layers), {entry.key for entry in entries}))


def packer(choose: Callable[..., Chosen]) -> Callable[..., None]:
    """The verb `pack`, with the options of `choose` too, which says what may be packed."""
    own = inspect.signature(_pack).parameters
    more = inspect.signature(choose).parameters

    def pack(**given: Any) -> None:
        with errors_as_json(given["as_json"]):
            settings = from_environment()
            chosen = choose(settings, **{name: given.pop(name) for name in more if name in given})
            _pack(chosen, settings, **given)

    file, *options = (each for name, each in own.items() if name not in ("chosen", "settings"))
    chooses = (each for name, each in more.items() if name != "settings")
    keyword = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in (*chooses, *options)]
    pack.__doc__ = _pack.__doc__
    pack.__dict__["__signature__"] = inspect.Signature([file, *keyword])
    return pack


def _pack(
    chosen: Chosen,
    settings: Settings,
    file: PackFile,
    *,
    rows: Rows = "",
    plan: PlanNames = None,
    with_runtime: WithRuntime = False,
    form: Format = "tar.zst",
    name: Name = "",
    sign: Sign = None,
    as_json: Json = False,
) -> None:
    """Put the cache's entries and plans into one file, or a directory, image layout or wheel."""
    from cache_tools.pack import Form
    from cache_tools.pack import pack as pack_entries

    if rows or plan:
        chosen = _narrowed(chosen, rows, plan or ())
    runtime = None
    if with_runtime:
        from cache_tools.runtime_carried import runtime_to_carry

        runtime = runtime_to_carry(settings)
    form_of = Form(form, name or chosen.name, sign)
    tell_packed(pack_entries(file, chosen.entries, runtime, form_of, chosen.plans), as_json=as_json)


def _narrowed(found: Chosen, rows: str, names: Sequence[str]) -> Chosen:
    """Only some plans, and of the entries those that they name."""
    from cache_tools.plan_files import chosen, parse_rows

    plans = chosen(found.plans, parse_rows(rows), names)
    keys = {key for each in plans for key in each.plan.keys()}  # noqa: SIM118 - a plan is no mapping
    return Chosen([entry for entry in found.entries if entry.key in keys], plans, found.name)


def tell_packed(packed: Any, *, as_json: bool) -> None:
    """Say what a `cache_tools.pack.Packed` is."""
    if as_json:
        answer_json({**asdict(packed), "path": str(packed.path)})
        return
    digest = f", sha256 {packed.sha256}" if packed.sha256 else ""
    signed = f", signed with the key {packed.signer[:16]}" if packed.signer else ", not signed"
    answer(f"{packed.path}: {packed.entries} entries, {packed.plans} plans, {packed.size} bytes{digest}")
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
    plans = f"; {done.plans} plans" if done.plans else ""
    answer(f"{file}: {done.new} entries unpacked into {layer.root}, {done.kept} were there already{plans}{signed}")
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
        a, b = (read_source(path, ANY, settings) for path in (first, second))
        result = cache_difference(a, b)
    if as_json:
        answer_json(difference_json(result))
    else:
        for line in difference_lines(result, str(first), str(second)):
            answer(line)
    if not result.equal:
        raise typer.Exit(1)


pack = packer(everything)
