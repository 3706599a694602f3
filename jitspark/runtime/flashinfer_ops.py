"""All that jitspark knows of FlashInfer: no other module may import it, and importing this one does not either.

Of the parts that a deployment may ask of it, attention has operations here, for Blackwell. `LACKING` says why the
others are refused: it has fused collectives and finalizes, but not one for each of our launches there (docs/vllm.md).
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jitspark.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

DISTRIBUTION = "flashinfer-python"
VERSION = "0.7.2.post1"  # the one whose signatures are known, and that the supported vLLM pins
TARGETS = ("sm_100a", "sm_103a")  # where it has every function that this package would call


def missing() -> str | None:
    """None where FlashInfer can be used, else what is there instead of the known version.

    A property of this process' environment, not of a config: nodes with different images answer differently, so
    ranks still have to agree before they rely on it.
    """
    try:
        found = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "it is not installed"
    if found != VERSION:
        return f"{found} is installed"
    return None if importlib.util.find_spec("flashinfer") else "its package is missing"


# By part: what the known version has no function for. Read from its signatures and from what they say of dtypes.
LACKING: Mapping[str, str] = {
    "experts": "no experts that read a plan's weights and leave a row for each token and slot",
    "all_reduce": "no gated residual fused with its all-reduce, no finalize of FP32 rows",
}

HEAD_DIM = 64
BLOCK_SIZE = 16
WORKSPACE_BYTES = 128 * 1024 * 1024  # what its attention asks for, zero at first

# What is called, with the names of the arguments that are given.
CALLED: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("flashinfer.decode", "trtllm_batch_decode_with_kv_cache"): (
        "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale", "window_left",
        "out", "kv_layout", "q_len_per_req",
    ),
    ("flashinfer.norm", "rmsnorm_sigmoid_gate"): ("input", "gate", "eps"),
}  # fmt: skip


def flashinfer_operations(device: Any) -> dict[tuple[str, str], Callable[..., object]]:
    """Operations by ("flashinfer", operation) for one executor. Raises UsageError where FlashInfer is another one.

    Keys and values are appended by vLLM's own operator, as vLLM does in front of FlashInfer's attention.
    """
    problem = missing() or next(iter(signature_problems()), None)
    if problem is not None:
        raise UsageError(
            where="provider flashinfer",
            found=problem,
            needed=f"{DISTRIBUTION} {VERSION}",
            remedy="Install that version, or leave this part to another provider.",
        )
    from jitspark.runtime.stock_ops import qk_rmsnorm_rope_paged_kv_append

    attention = _Attention(device)
    return {
        ("flashinfer", "qk_rmsnorm_rope_paged_kv_append"): qk_rmsnorm_rope_paged_kv_append,
        ("flashinfer", "paged_gqa_verify_attention"): attention.note,
        ("flashinfer", "splitkv_combine_rmsnorm_sigmoid_gate"): attention.run,
    }


def signature_problems() -> list[str]:
    """Every function that is not there, or does not take what it would be given."""
    found = []
    for (module, name), arguments in CALLED.items():
        function = getattr(importlib.import_module(module), name, None)
        known = () if function is None else inspect.signature(function).parameters
        lacking = [each for each in arguments if each not in known]
        if lacking:
            found.append(f"{module}.{name} without {', '.join(lacking)}")
    return found


@functools.cache
def _workspace(device: Any) -> "Tensor":
    """One for all executors of a device, which never run at the same time."""
    import torch

    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class _Attention:
    """Attention over the paged cache where splits would be merged, then the gated norm, in place."""

    def __init__(self, device: Any) -> None:
        self._workspace = _workspace(device)
        self._noted: tuple[Any, ...] = ()

    def note(self, *arguments: Any, sliding_window: int, **_: Any) -> None:
        qkvg, kv_cache, block_table, seq_lens = arguments[:4]
        self._noted = (qkvg, kv_cache, block_table, seq_lens, arguments[-1], sliding_window)

    def run(self, *arguments: Any, **_: Any) -> None:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
        from flashinfer.norm import rmsnorm_sigmoid_gate

        qkvg, out, eps = arguments[3:]
        noted, kv_cache, block_table, seq_lens, softmax_scale, window = self._noted
        assert noted is qkvg, "the launches of a layer's attention belong together"
        rows, width = out.shape
        heads: Tensor = out.view(rows, -1, HEAD_DIM)
        trtllm_batch_decode_with_kv_cache(
            query=qkvg[:, :width].view(rows, -1, HEAD_DIM),
            kv_cache=(kv_cache[..., :HEAD_DIM], kv_cache[..., HEAD_DIM:]),
            workspace_buffer=self._workspace,
            block_tables=block_table,
            seq_lens=seq_lens,
            max_seq_len=block_table.shape[1] * BLOCK_SIZE,
            bmm1_scale=softmax_scale,
            window_left=window - 1 if window else -1,
            out=heads,
            kv_layout="HND",
            q_len_per_req=rows // len(seq_lens),
        )
        rmsnorm_sigmoid_gate(heads, qkvg[:, -width:].view(rows, -1, HEAD_DIM), eps=eps)
