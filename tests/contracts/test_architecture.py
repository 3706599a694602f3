"""ARCHITECTURE.md is the living copy: its layers are the modules that exist, in the order that is checked."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def documented_layers():
    """(modules, whether the row is planned) for each row of the table, top to bottom."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.partition("## Layers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", section, flags=re.MULTILINE)
    return [(re.findall(r"`(\w+)`", modules), "*planned*" in owns) for modules, owns in rows]


def checked_layers():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    return [re.findall(r"\w+", layer) for layer in contracts[0]["layers"]]


def existing_modules():
    found = (path for path in (ROOT / "jitspark").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file())
    return {path.stem for path in found} - {"__init__", "__main__"}


def test_every_module_is_documented_once():
    documented = [module for modules, _ in documented_layers() for module in modules]

    assert len(documented) == len(set(documented))
    assert existing_modules() <= set(documented)


def test_what_is_documented_exists_or_is_planned():
    promised = {module for modules, planned in documented_layers() if not planned for module in modules}

    assert promised <= existing_modules()


def test_the_table_goes_down_as_the_checked_layers_do():
    height = {module: level for level, modules in enumerate(checked_layers()) for module in modules}
    programs = {"compiler", "checking"}  # beside the layers: they come last in the table
    levels = [height[module] for modules, _ in documented_layers() for module in modules if module not in programs]

    assert levels == sorted(levels)
