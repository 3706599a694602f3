"""README lists every command with its options, and every script; docs/vllm.md every option of a deployment."""

import re
from pathlib import Path

import pytest
import typer.main

from jitspark.cli.app import app
from jitspark.runtime.options import _OPTIONS, _SETTINGS
from jitspark.runtime.parts import PARTS

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = typer.main.get_command(app).commands
EVERYWHERE = {"--json", "--help"}  # said once, below the table


def rows(section):
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition(f"## {section}")[2].partition("\n## ")[0]
    return [line for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_listed_with_its_options(name):
    listed = [row for row in rows("Commands") if row.startswith(f"| `jitspark {name}")]
    options = {option for each in COMMANDS[name].params for option in each.opts if option.startswith("--")}

    assert listed
    assert {option for option in options - EVERYWHERE if f"`{option}" not in " ".join(listed)} <= {"--tp"}
    assert "--tp" not in options or "--tp" in " ".join(listed)


def test_no_command_or_option_is_listed_that_does_not_exist():
    for row in (row for row in rows("Commands") if row.startswith("| `jitspark ")):
        name = re.match(r"\| `jitspark (\w+)", row)[1]
        known = {option for each in COMMANDS[name].params for option in each.opts}

        assert set(re.findall(r"--[a-z-]+", row)) <= known, name


def test_every_script_is_listed():
    scripts = {path.name for path in (ROOT / "bin").iterdir() if path.is_file() and not path.suffix}
    listed = {found[1] for row in rows("Commands") if (found := re.match(r"\| `bin/([\w-]+)`", row))}

    assert listed == scripts


def test_every_option_of_a_deployment_is_listed():
    text = (ROOT / "docs/vllm.md").read_text(encoding="utf-8")

    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == {*_OPTIONS, *_SETTINGS}
    assert all(f"`{part}`" in text for part in PARTS)
