"""ARCHITECTURE.md is the living copy: its layers are the modules that exist, in the order that is checked."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def checked_layers():
    """Container -> its layers, top to bottom, each a list of modules."""
    read = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    contracts = [contract for contract in read if contract["type"] == "layers"]
    return {
        contract["containers"][0]: [re.findall(r"\w+", layer) for layer in contract["layers"]] for contract in contracts
    }


def documented_layers(container):
    """(modules, whether the row is planned) for each row of the container's table, top to bottom."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## Layers")[2].partition("\n## ")[0]
    heading = (
        "| layer | owns |" if container == "jitspark" else f"| in `{container.removeprefix('jitspark.')}` | owns |"
    )
    table = section.partition(heading)[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", table, flags=re.MULTILINE)
    return [(re.findall(r"`(\w+)`", modules), "*planned*" in owns) for modules, owns in rows]


def existing_modules(container):
    folder = ROOT.joinpath(*container.split("."))
    found = (path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
    return {path.stem for path in found} - {"__init__", "__main__"}


CONTAINERS = pytest.mark.parametrize("container", checked_layers())


@CONTAINERS
def test_every_module_is_documented_once(container):
    documented = [module for modules, _ in documented_layers(container) for module in modules]

    assert len(documented) == len(set(documented))
    assert existing_modules(container) <= set(documented)


@CONTAINERS
def test_what_is_documented_exists_or_is_planned(container):
    promised = {module for modules, planned in documented_layers(container) if not planned for module in modules}

    assert promised <= existing_modules(container)


@CONTAINERS
def test_the_table_goes_down_as_the_checked_layers_do(container):
    height = {module: level for level, modules in enumerate(checked_layers()[container]) for module in modules}
    programs = {"compiler", "checking"}  # beside the layers, they stand behind the command line in the table
    levels = [
        height[module] for modules, _ in documented_layers(container) for module in modules if module not in programs
    ]

    assert levels == sorted(levels)
