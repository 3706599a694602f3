"""Names of files and shapes of values that reviews kept asking for."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("jitspark", "kernel_specs", "cache_tools", "tests", "bench", "bin", "examples")
DRAWER = re.compile(r"_?(utils?|common|helpers?|misc|base)")


def sources():
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]


def dataclass_decorators(path):
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from ((node.name, ast.unparse(d)) for d in node.decorator_list if "dataclass" in ast.unparse(d))


def is_silent(source):
    return source.strip() and not ast.get_docstring(ast.parse(source))


def test_no_file_or_folder_is_a_drawer():
    names = {part for path in sources() for part in path.relative_to(ROOT).with_suffix("").parts}

    assert not [name for name in names if DRAWER.fullmatch(name)]


def test_every_public_dataclass_is_frozen_and_slotted():
    found = [(path.name, *each) for path in sources() for each in dataclass_decorators(path)]

    assert found
    assert not [each for each in found if "frozen=True" not in each[2] or "slots=True" not in each[2]]


def test_every_module_says_what_it_owns():
    silent = [path for path in sources() if is_silent(path.read_bytes())]

    assert not silent
