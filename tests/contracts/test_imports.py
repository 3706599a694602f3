"""Who may import what, seen from fresh interpreters and from the import graph."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jitspark.registry import kernel_names

ROOT = Path(__file__).resolve().parents[2]
COMPILER = {"cutlass", "jitspark.compiler"}
HEAVY = COMPILER | {"torch", "vllm", "flashinfer"}
# programs and what runs inside vLLM; everything else must be cheap to import
PROGRAMS = {"__main__", "checking", "cli", "compiler", "vllm_plugin", "runtime", "models", "reference_executor"}
NOT_FOR_LOADING = HEAVY | {"diskcache", "filelock", "msgspec", "pynvml", "rich", "typer"}


def modules_after_importing(*names):
    code = f"import importlib, sys; [importlib.import_module(n) for n in {names!r}]; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


def light_modules():
    names = (path.stem for path in (ROOT / "jitspark").iterdir() if path.suffix == ".py" or path.is_dir())
    return sorted(
        f"jitspark.{name}" for name in names if name not in PROGRAMS and name.isidentifier() and name[0] != "_"
    )


def test_this_interpreter_has_torch_so_that_its_absence_means_something():
    assert "torch" in modules_after_importing("torch")


@pytest.mark.parametrize("kernel", kernel_names())
def test_a_spec_imports_neither_torch_nor_the_compiler(kernel):
    loaded = modules_after_importing(f"kernel_specs.{kernel}.spec")

    assert not loaded & HEAVY


@pytest.mark.parametrize("module", light_modules())
def test_the_service_imports_nothing_heavy(module):
    loaded = modules_after_importing(module)

    assert not loaded & HEAVY


def test_loading_imports_no_compiler_and_no_library_but_the_abi():
    loaded = modules_after_importing("jitspark.cache.loader", "jitspark.cache.store", "jitspark.cache.lookup")

    assert not loaded & NOT_FOR_LOADING


def test_the_import_contracts_hold():
    lint_imports = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert lint_imports, "import-linter is not installed"

    result = subprocess.run([lint_imports, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert result.returncode == 0, result.stdout + result.stderr
