"""Sizes of functions and files. Fails when a function is longer than 60 lines; device code is exempt."""

import ast
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_FUNCTION = 60
MAX_FILE = 300
MAX_TEST_FILE = 400


@dataclass(frozen=True, slots=True)
class Function:
    where: str
    name: str
    lines: int


def sources() -> list[str]:
    """Tracked and new Python files, by their place in the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return sorted(name for name in names if (ROOT / name).is_file())


def is_device_code(source: str) -> bool:
    """Kernels and their primitives: straight-line device functions, as long as the hardware needs them."""
    return source.startswith("kernel_specs/") and (source.endswith("/kernel.py") or "/primitives/" in source)


def functions(source: str) -> list[Function]:
    tree = ast.parse((ROOT / source).read_bytes(), filename=source)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds)]
    return [Function(source, node.name, node.end_lineno - node.lineno + 1) for node in found if node.end_lineno]


def summary(title: str, lengths: list[int]) -> str:
    if not lengths:
        return f"{title:<22} none"
    tenth = sorted(lengths)[int(0.9 * (len(lengths) - 1))]
    median = statistics.median_low(lengths)
    return f"{title:<22} {len(lengths):>5}   median {median:>3}   p90 {tenth:>3}   max {max(lengths):>4}"


def main() -> int:
    names = sources()
    everything = [function for name in names for function in functions(name)]
    host = [function for function in everything if not is_device_code(function.where)]
    product = [function for function in host if not function.where.startswith("tests/")]
    print(summary("functions", [function.lines for function in product]))
    print(summary("test functions", [function.lines for function in host if function not in product]))
    print(summary("device functions", [function.lines for function in everything if function not in host]))
    for name in names:
        lines = (ROOT / name).read_bytes().count(b"\n")
        if lines > (MAX_TEST_FILE if name.startswith("tests/") else MAX_FILE):
            print(f"long file: {name} has {lines} lines; a file with two subjects should be two")
    too_long = [function for function in host if function.lines > MAX_FUNCTION]
    for function in too_long:
        print(f"too long: {function.where}: {function.name} has {function.lines} lines, at most {MAX_FUNCTION} allowed")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
