"""The compiler's CUDA flavour is ours to choose, not the installed driver's: it decides an artifact's bytes."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from jitspark.toolchain import extension_module


@pytest.fixture
def older_driver(tmp_path):
    """The environment of a process that finds a driver of CUDA 12.8: `cuDriverGetVersion` and nothing else."""
    if platform.machine() != "x86_64" or extension_module() is None:
        pytest.skip("needs nvidia-cutlass-dsl; the driver is a few bytes of x86-64 code")

    def run(*command):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "code").write_bytes(bytes.fromhex("c707") + (12080).to_bytes(4, "little") + bytes.fromhex("31c0c3"))
    run("ld", "-r", "-b", "binary", "-o", "code.o", "code")
    section = ("--rename-section", ".data=.text,alloc,load,readonly,code,contents")
    run("objcopy", *section, "--redefine-sym", "_binary_code_start=cuDriverGetVersion", "code.o", "driver.o")
    run("ld", "-shared", "-z", "noexecstack", "-soname", "libcuda.so.1", "-o", "libcuda.so.1", "driver.o")
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": root, "LD_LIBRARY_PATH": str(tmp_path)}


@pytest.mark.parametrize(
    ("import_it", "flavour"),
    [("import cutlass", ".cu12."), ("from jitspark.compiler.cute import import_dsl; import_dsl()", ".cu13.")],
    ids=["the DSL by itself", "pinned"],
)
def test_the_cuda_flavour_is_pinned_whatever_the_driver_is(older_driver, import_it, flavour):
    show = "import sys; print(sys.modules['cutlass._mlir._mlir_libs._cutlass_ir'].__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{import_it}; {show}"], env=older_driver, capture_output=True, text=True
    )

    assert flavour in done.stdout, done.stderr
