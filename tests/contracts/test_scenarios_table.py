"""docs/scenarios.md and the scenario tests say the same: each thread has a test, and that test names it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
THREAD = re.compile(r"[A-Za-z-]+#\d+")


def table():
    """(thread, test) of every row."""
    text = (ROOT / "docs/scenarios.md").read_text(encoding="utf-8")
    return re.findall(r"^\| ([A-Za-z-]+#\d+) \| .* \| `(test_\w+)` \|$", text, re.MULTILINE)


def docstrings():
    """Docstring of every scenario test, by its name."""
    files = (ROOT / "tests/processes").glob("test_scenarios_*.py")
    functions = (
        node for path in files for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.FunctionDef)
    )
    return {node.name: ast.get_docstring(node) or "" for node in functions if node.name.startswith("test_")}


def test_every_row_names_a_test_that_names_the_thread():
    tests = docstrings()

    assert len(table()) > 40
    assert not [row for row in table() if row[0] not in tests.get(row[1], "")]


def test_every_thread_that_a_test_names_is_in_the_table():
    named = {thread for text in docstrings().values() for thread in THREAD.findall(text)}

    assert named == {thread for thread, _ in table()}
