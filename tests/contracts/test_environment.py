"""The environment is read in one module, and the README lists what it reads."""

import ast
import re
from dataclasses import fields
from pathlib import Path

from jitspark.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
READERS = {"environ", "environb", "getenv", "getenvb"}
VARIABLE = re.compile(r"(JITSPARK|XDG)_[A-Z_]+|HOME")


def product_sources():
    return [path for folder in ("jitspark", "kernel_specs", "cache_tools") for path in (ROOT / folder).rglob("*.py")]


def environment_reads(path):
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Attribute) and node.attr in READERS:
            yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in READERS)


def table_rows():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("## Environment variables")[2].partition("\n## ")[0]
    rows = [line.strip().strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [(set(re.findall(r"`([A-Z_]+)`", row[0])), row[1].strip().strip("`")) for row in rows]


def test_only_settings_reads_the_environment():
    readers = {path.relative_to(ROOT).as_posix() for path in product_sources() if any(environment_reads(path))}

    assert readers == {"jitspark/settings.py"}


def test_the_readme_lists_every_setting_once():
    assert sorted(setting for _, setting in table_rows()) == sorted(field.name for field in fields(Settings))


def test_the_readme_lists_every_variable_that_is_read():
    tree = ast.parse((ROOT / "jitspark/settings.py").read_bytes())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}

    assert set().union(*(names for names, _ in table_rows())) == {text for text in texts if VARIABLE.fullmatch(text)}
