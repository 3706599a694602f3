"""What a step must read: each weight once, of the routed experts only the active ones, and the keys and values seen."""

from collections.abc import Mapping, Sequence

from jitspark.checking.plan_arguments import first_uses
from jitspark.plan import Kind, Plan
from jitspark.spec import DTYPE_BYTES

GROUPED = tuple(f"{dtype}_grouped_gemm_{which}" for dtype in ("nvfp4", "bf16") for which in ("swiglu", "partial"))
UNREAD = ("cos_sin",)  # a row a token


def floor_bytes(plan: Plan, seq_lens: Sequence[int], distinct: int, num_experts: int) -> Mapping[str, float]:
    """Bytes by part of the step. Activations, a hundredth of this, are left out."""
    uses = first_uses(plan)
    found: dict[str, float] = {}
    for buffer in plan.buffers:
        if buffer.kind == Kind.WEIGHT and uses[buffer.name].argument not in UNREAD:
            launch = uses[buffer.name].launch
            share = distinct / num_experts if launch.operation in GROUPED else 1.0
            found[launch.part] = found.get(launch.part, 0.0) + share * _bytes(buffer.shape, buffer.dtype)
    for launch in plan.launches:
        if launch.operation == "paged_gqa_verify_attention":
            window = int(launch.statics["sliding_window"])
            keys = sum(min(length, window + plan.query_length - 1) if window else length for length in seq_lens)
            cache = next(plan.buffer_named()[each.buffer] for each in launch.tensors() if each.buffer.endswith("cache"))
            heads, _, width = (int(size) for size in cache.shape[1:])
            found[launch.part] = found.get(launch.part, 0.0) + keys * heads * width * DTYPE_BYTES[cache.dtype]
    return found


def _bytes(shape: Sequence[int | str], dtype: str) -> float:
    total = float(DTYPE_BYTES[dtype])
    for size in shape:
        total *= int(size)
    return total
