"""vLLM's own sampling functions on a CPU, by Triton's interpreter.

    TRITON_INTERPRET=1 python tests/interpreted_draws.py INPUTS.pt OUTPUTS.pt

A process of its own: the variable must be set before Triton is imported. vLLM's file is loaded alone and with Triton
proper, since vLLM puts a stand-in there on a machine without a GPU. INPUTS: a list of calls (`of` names the function).
"""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

HASHES, UNIFORMS, DRAWS = "hashes", "uniforms", "draws"

KERNELS = """
import interpreted_gumbel as gumbel
from vllm.triton_utils import tl, triton


@triton.jit
def hashes(out, seeds, positions, tokens, step, COUNT: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, COUNT)
    seed = gumbel.spec_step_seed(tl.load(seeds + row), step)
    found = gumbel.murmur3_hash32(seed, tl.load(positions + row), tl.load(tokens + columns))
    tl.store(out + row * COUNT + columns, found.to(tl.int64))


@triton.jit
def uniforms(out, seeds, positions, tokens, step, COUNT: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, COUNT)
    seed = gumbel.spec_step_seed(tl.load(seeds + row), step)
    found = gumbel.murmur3_uniform32(seed, tl.load(positions + row), tl.load(tokens + columns))
    tl.store(out + row * COUNT + columns, found)


@triton.jit
def draws(out, logits, seeds, positions, temperature, step, count, COUNT: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, COUNT)
    mask = columns < count
    values = tl.load(logits + row * count + columns, mask=mask, other=float("-inf"))
    seed = gumbel.spec_step_seed(tl.load(seeds + row), step)
    _, best = gumbel.gumbel_noised_argmax(
        values, columns, mask, seed, tl.load(positions + row), tl.load(temperature + row), True, False
    )
    tl.store(out + row, best.to(tl.int64))
"""


def interpreted(folder, calls):
    """What vLLM's functions give for each of `calls`, in order."""
    given, found = folder / "calls.pt", folder / "found.pt"
    torch.save(calls, given)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_CACHE_DIR": str(folder / "triton")}
    subprocess.run([sys.executable, __file__, str(given), str(found)], check=True, env=environment, timeout=1200)
    return torch.load(found, weights_only=True)


def _run(kernels, of, **given):
    rows = len(given["seeds"])
    if of == DRAWS:
        out = torch.zeros(rows, dtype=torch.int64)
        logits = given["logits"].float()
        width = 1 << (logits.shape[1] - 1).bit_length()
        order = (given["seeds"], given["positions"], given["temperature"], given["step"], logits.shape[1])
        kernels.draws[(rows,)](out, logits, *order, COUNT=width)
        return out
    tokens = given["tokens"]
    out = torch.zeros(rows, len(tokens), dtype=torch.int64 if of == HASHES else torch.float32)
    kernel = getattr(kernels, of)
    kernel[(rows,)](out, given["seeds"], given["positions"], tokens, given["step"], COUNT=len(tokens))
    return out


def _loaded(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(given, found):
    import triton
    import triton.language

    sys.modules["vllm.triton_utils"] = SimpleNamespace(triton=triton, tl=triton.language)
    package = Path(importlib.metadata.distribution("vllm").locate_file("vllm"))
    _loaded("interpreted_gumbel", package / "v1/worker/gpu/sample/gumbel.py")
    source = Path(given).with_name("interpreted_kernels.py")
    source.write_text(KERNELS)
    kernels = _loaded("interpreted_kernels", source)
    torch.save([_run(kernels, **call) for call in torch.load(given, weights_only=True)], found)


if __name__ == "__main__":
    main(*sys.argv[1:])
