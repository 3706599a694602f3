"""The kernel that CONTRIBUTING.md shows is a good one: it fits the contract, compiles and links for every target."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from jitspark.machine_code import disassemble
from jitspark.target import TARGETS

ROOT = Path(__file__).resolve().parents[2]
NAME = "scaled_add"
COMPILE = """
import sys
from pathlib import Path
import kernel_specs
kernel_specs.__path__.insert(0, sys.argv[1])
from jitspark import registry
from jitspark.compiler.compile import compile_specialization
registry.KERNELS_DIR = Path(sys.argv[1])
spec = registry.load_spec("scaled_add")
case = spec.specialize_case(spec.cases[int(sys.argv[3])])
print(compile_specialization(case, sys.argv[2], Path(sys.argv[1])).signature)
"""
REFERENCE = """
import sys
import torch
import kernel_specs
kernel_specs.__path__.insert(0, sys.argv[1])
from kernel_specs.scaled_add.reference import scaled_add
x, y, out = torch.randn(7, 64), torch.randn(7, 64), torch.empty(7, 64, dtype=torch.bfloat16)
scaled_add(x, y, out, 0.5, threads=128)
torch.testing.assert_close(out, torch.add(y, x, alpha=0.5).bfloat16())
"""


@pytest.fixture
def folder(tmp_path):
    """A kernels folder that holds what CONTRIBUTING.md shows."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    sources = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    (tmp_path / NAME).mkdir()
    for file, source in zip(("spec.py", "kernel.py", "reference.py"), sources, strict=True):
        (tmp_path / NAME / file).write_text(source, encoding="utf-8")
    return tmp_path


def run(code, *arguments):
    result = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", [0, 1])
def test_the_example_compiles(folder, target, case):
    signature = run(COMPILE, folder, target, case)

    assert all(name in signature for name in ("x", "y", "out", "scale"))
    code = disassemble((folder / "kernel.so").read_bytes())
    assert (code.target, code.stack, code.local) == (target, 0, 0)
    assert [name for name in ("LDG", "FFMA", "STG") if not code.holds(name)] == []


def test_the_example_reference_computes_what_it_says(folder):
    run(REFERENCE, folder)


def test_the_example_keeps_to_the_style(folder):
    # the docstrings of the example are its documentation; only line length and correctness rules apply
    ruff = [Path(sys.executable).parent / "ruff", "check", "--isolated", "--line-length=120", "--select=E,F,B,UP,I"]

    result = subprocess.run([*ruff, folder / NAME], capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout
