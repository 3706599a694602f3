"""The commands and their options. Imports no more than the options need; each command imports what it runs."""

from pathlib import Path
from typing import Annotated

import typer

from cache_tools import cleaning, commands, shipping
from cache_tools.command_line import answer, answer_json, errors_as_json, say
from cache_tools.commands import Json
from cache_tools.shipping import Targets
from jitspark.cli.selection import Selection, parse_targets, parse_tp
from jitspark.settings import Settings, from_environment

DEFAULT_GEOMETRY = "muse_spark_open"

app = typer.Typer(
    help="Compile, look at and carry the decode kernels of a deployment. "
    "`--traceback` with any command shows where an error was raised.",
    no_args_is_help=True,
    add_completion=False,
)
app.command()(commands.ls)
app.command()(shipping.unpack)
app.command()(shipping.merge)
app.command()(shipping.diff)
app.command()(cleaning.verify)
app.command()(cleaning.prune)
app.command()(cleaning.stats)

TpSizes = Annotated[str, typer.Option("--tp", metavar="N[,N]", help="TP sizes of the deployments.")]
Geometry = Annotated[str, typer.Option(metavar="NAME|FILE", help="The model: a built-in geometry or a TOML file.")]
Kernels = Annotated[list[str] | None, typer.Option("--kernel", metavar="NAME", help="Only this one; repeatable.")]
BuildTargets = Annotated[
    str, typer.Option("--target", metavar="T[,T]", help="GPU targets; without it those of this machine, else sm_100a.")
]
Jobs = Annotated[int | None, typer.Option(min=1, max=1024, help="Compiler processes, at most the node's slots.")]
Retry = Annotated[bool, typer.Option("--retry", help="Compile again what failed lately.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="List the keys and whether each is there; compile nothing.")]


@app.command()
def warm(
    tp: TpSizes,
    target: BuildTargets = "",
    geometry: Geometry = DEFAULT_GEOMETRY,
    kernel: Kernels = None,
    jobs: Jobs = None,
    retry: Retry = False,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Compile everything that deployments of these TP sizes ask for, unless the cache has it."""
    from jitspark.cli import warm as command

    with errors_as_json(as_json):
        settings = from_environment()
        selection = _selection(tp, target, geometry, kernel)
        if dry_run:
            command.dry_run(selection, settings, as_json=as_json)
            return
        failed = command.warm(selection, command.Options(jobs, retry, as_json), settings)
    if failed is not None:
        raise failed


@app.command()
def plan(
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="The deployment's TP size.")],
    rows: Annotated[int | None, typer.Option("--m", metavar="ROWS", help="The rows; without it one request's.")] = None,
    stage: Annotated[str, typer.Option(help="decode, logits, draft, draft_context or markov.")] = "decode",
    target: Annotated[str, typer.Option(help="The GPU target; without it this machine's, else sm_100a.")] = "",
    *,
    geometry: Geometry = DEFAULT_GEOMETRY,
    launches: Annotated[bool, typer.Option("--launches", help="Each launch, not those alike together.")] = False,
    weights: Annotated[bool, typer.Option("--weights", help="Its weights instead: from where, and how held.")] = False,
    context: Annotated[int, typer.Option("--ctx", min=1, help="Keys of each request.")] = 32768,
    distinct: Annotated[
        float | None, typer.Option("--distinct-experts", min=0, help="Experts that the rows go to; else as by chance.")
    ] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="TB/s of the floor; the default is an H200's.")] = 4.42,
    draw: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .svg, .png or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Show a step as data: its launches with their keys, bytes and floors."""
    from jitspark.cli.show_plan import View, show_plan
    from jitspark.plans.costs import Workload
    from jitspark.plans.planning import Served

    with errors_as_json(as_json):
        chosen = parse_targets(target, say)[0]
        view = View(Workload(context, distinct, rate * 1e12), launches, weights, as_json, draw)
        show_plan(Served(geometry, tp, chosen, {}), stage, rows, from_environment(), view)


@app.command()
def compare(
    tp: Annotated[int, typer.Option("--tp", metavar="N", help="The deployment's TP size.")],
    rows: Annotated[int, typer.Option("--m", metavar="ROWS", help="The rows of the step.")] = 8,
    stage: Annotated[str, typer.Option(help="decode or logits.")] = "decode",
    subject: Annotated[str, typer.Option(help="kernels, stock or torch; by default what this machine can run.")] = "",
    *,
    geometry: Geometry = DEFAULT_GEOMETRY,
    context: Annotated[int, typer.Option("--ctx", min=8, help="Keys of the longest request.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the random weights and inputs.")] = 0,
    target: Annotated[str, typer.Option(help="The GPU target; without it this machine's, else sm_100a.")] = "",
    as_json: Json = False,
) -> None:
    """Run a step twice, by kernels and by references: the first launch that leaves its tolerance."""
    from jitspark.cli.compare_runs import Comparing
    from jitspark.cli.compare_runs import compare as run
    from jitspark.plans.planning import Served

    with errors_as_json(as_json):
        chosen = Comparing(stage, rows, subject, context, seed)
        served = Served(geometry, tp, parse_targets(target, say)[0], {})
        alike = run(served, chosen, from_environment(), as_json=as_json)
    raise typer.Exit(not alike)


@app.command()
def explain(
    name: Annotated[str, typer.Argument(metavar="KEY|KERNEL")],
    tp: Annotated[str, typer.Option("--tp", metavar="N[,N]", help="Of a kernel: for these TP sizes, else all.")] = "",
    target: BuildTargets = "",
    geometry: Geometry = DEFAULT_GEOMETRY,
    as_json: Json = False,
) -> None:
    """What went into a key, or whether a kernel's keys are in the cache and, if not, why not."""
    from cache_tools.entries import is_key

    if is_key(name):
        commands.explain(name, as_json)
        return
    from jitspark.cli.explain_kernel import explain_kernel

    with errors_as_json(as_json):
        explain_kernel(name, tp, target, geometry, from_environment(), as_json=as_json)


@app.command()
def doctor(
    pack: Annotated[
        Path | None,
        typer.Option("--pack", metavar="FILE", help="Also what this pack needs; its signature is not checked."),
    ] = None,
    *,
    vllm: Annotated[bool, typer.Option("--vllm", help="Also whether vLLM finds the decode runtime here.")] = False,
    selftest: Annotated[bool, typer.Option("--selftest", help="Also run a small decode step on the GPU.")] = False,
    as_json: Json = False,
) -> None:
    """Check everything that jitspark needs from this machine."""
    from jitspark.doctor import checks, checks_json, checks_lines

    with errors_as_json(as_json):
        found = checks(from_environment(), pack, vllm=vllm)
        if selftest:
            from jitspark.cli.selftest import selftest as run_step

            found.append(run_step(from_environment()))
    if as_json:
        answer_json(checks_json(found))
    else:
        for line in checks_lines(found):
            answer(line)
    raise typer.Exit(any(check.status == "FAIL" for check in found))


def _to_pack(
    settings: Settings,
    target: Targets = "",
    tp: Annotated[str, typer.Option("--tp", metavar="N[,N]", help="Exactly what these deployments ask for.")] = "",
    geometry: Geometry = DEFAULT_GEOMETRY,
) -> shipping.Chosen:
    """All there is, or exactly what deployments ask for."""
    if not tp:
        return shipping.everything(settings, target)
    from jitspark.cli.pack_deployment import of_deployments

    return of_deployments(_selection(tp, target, geometry, None), settings)


app.command("pack")(shipping.packer(_to_pack))


def _selection(tp: str, target: str, geometry: str, kernels: list[str] | None) -> Selection:
    return Selection(parse_tp(tp), parse_targets(target, say), geometry, tuple(kernels or ()))
