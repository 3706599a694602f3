"""`python -m cache_tools <verb>`: the cache's own verbs, where neither compiler nor torch is installed."""

import sys
from collections.abc import Callable

import typer

from cache_tools import cleaning, commands, shipping
from cache_tools.command_line import run

if __name__ == "__main__":
    app = typer.Typer(help="Look at and carry cache directories.", no_args_is_help=True, add_completion=False)
    verbs: tuple[Callable[..., None], ...] = (
        *(commands.ls, commands.explain),
        *(shipping.pack, shipping.unpack, shipping.merge, shipping.diff),
        *(cleaning.verify, cleaning.prune, cleaning.stats),
    )
    for verb in verbs:
        app.command()(verb)
    run(app, sys.argv[1:], "cache_tools")
