"""The `jitspark` command. What goes wrong is one error and its exit code: see README, "Exit codes"."""

import sys


def main() -> None:
    """Run the command line and exit."""
    from cache_tools.command_line import run
    from jitspark.cli.app import app

    run(app, sys.argv[1:], "jitspark")
