"""`python -m cache_tools <verb>`: the cache's own verbs, where neither compiler nor torch is installed."""

import sys

import typer

from cache_tools import cleaning, commands
from cache_tools.command_line import run

if __name__ == "__main__":
    app = typer.Typer(help="Look at and carry cache directories.", no_args_is_help=True, add_completion=False)
    for verb in (commands.ls, commands.explain, commands.pack, commands.unpack):
        app.command()(verb)
    for cleaning_verb in (cleaning.verify, cleaning.prune, cleaning.stats):
        app.command()(cleaning_verb)
    run(app, sys.argv[1:], "cache_tools")
