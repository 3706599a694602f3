"""Digests of a kernel's sources: its kernel.py and the kernel_specs modules that it imports, and nothing else.

Names are relative to the folder that holds `kernel_specs`, so two checkouts agree; an unrelated kernel's edit
changes no other kernel's digest.
"""

import ast
import functools
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

from jitspark.errors import SpecError

PACKAGE = "kernel_specs"
ROOT = Path(__file__).resolve().parent.parent

# CPython 3.11 counts the depth of a syntax tree for all threads together, and fails where two make one at a time
_PARSING = threading.Lock()


def kernel_sources(kernel: str, module: str = "kernel", root: Path = ROOT) -> tuple[tuple[str, str], ...]:
    """(relative name, sha256) of every source that the kernel's code comes from, sorted by name.

    Raises SpecError when a source cannot be read.
    """
    start = f"{PACKAGE}/{kernel}/{module}.py"
    found: dict[str, str] = {}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found[name], imports = _read(root, name)
            waiting.extend(imports)
    return tuple(sorted(found.items()))


@functools.lru_cache(maxsize=1024)
def _read(root: Path, name: str) -> tuple[str, tuple[str, ...]]:
    try:
        content = (root / name).read_bytes()
    except OSError as problem:
        raise SpecError(
            where=name,
            found=problem.strerror or str(problem),
            needed="a readable Python source",
            remedy="Restore the file.",
        ) from None
    return hashlib.sha256(content).hexdigest(), tuple(sorted(_files_imported(root, name, content)))


def _files_imported(root: Path, name: str, content: bytes) -> set[str]:
    """None for what is no Python: it has a key all the same, whose compile fails alone and says where."""
    try:
        with _PARSING:
            tree = ast.parse(content, filename=name)
    except (SyntaxError, ValueError):
        return set()
    return {found for module in _imported(tree, name) for found in _files(root, module)}


def _imported(tree: ast.Module, name: str) -> Iterator[str]:
    """Dotted names of everything imported from kernel_specs, at any depth of the code; a package's parents too."""
    package = name.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _files(root: Path, module: str) -> Iterator[str]:
    parts = module.split(".")
    if parts[0] != PACKAGE:
        return
    for length in range(1, len(parts) + 1):
        path = "/".join(parts[:length])
        yield from (c for c in (f"{path}.py", f"{path}/__init__.py") if (root / c).is_file())
