"""The plugin's module is loaded by every process of vLLM: it must bring nothing heavy, and nothing of CUDA."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "vllm", "tvm_ffi", "msgspec", "numpy", "cutlass", "filelock", "diskcache", "rich", "typer", "pynvml"}


def test_it_imports_nothing_but_the_standard_library():
    code = "import json, sys, jitspark.vllm_plugin; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}

    assert loaded & HEAVY == set()
