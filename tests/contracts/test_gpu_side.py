"""What runs on a GPU machine needs the standard library, torch and apache-tvm-ffi only."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = {"torch", "numpy", "tvm_ffi", "typing_extensions", "triton"}

# Refuses every import from our own modules of a package that the GPU machine need not have.
GUARD = f"""
import sys
allowed = {ALLOWED!r} | set(sys.stdlib_module_names) | {{"jitspark", "kernel_specs", "bench"}}
class Guard:
    def find_spec(self, name, path=None, target=None):
        importer = sys._getframe(1)
        while importer and "importlib" in importer.f_code.co_filename:
            importer = importer.f_back
        package = importer.f_globals.get("__name__", "").split(".")[0] if importer else ""
        if package in ("jitspark", "kernel_specs", "bench") and name.split(".")[0] not in allowed:
            raise ImportError(f"{{importer.f_globals['__name__']}} imports {{name}}")
sys.meta_path.insert(0, Guard())
"""


def run(code):
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-P", "-c", GUARD + code]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_guard_refuses_what_is_not_allowed():
    answer = run("import jitspark.geometry")

    assert "jitspark.geometry imports msgspec" in answer.stderr


def test_checking_and_benchmarking_import_nothing_else():
    answer = run("import bench.check, bench.kernels\nprint(len(bench.check.every_case('sm_90a')))")

    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) > 100


def test_what_apache_tvm_ffi_offers_is_known_before_anything_else_imports_it():
    answer = run("import sys; from jitspark.cache.runtime_library import offers\nprint(offers('TVMFFIEnvGetStream'))")

    assert answer.stdout.strip() == "True", answer.stderr
