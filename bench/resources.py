"""What a kernel takes of a multiprocessor: registers and spills by its machine code, shared memory by its tiling."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jitspark.cache.store import Entry
from jitspark.machine_code import disassemble, disassembler
from jitspark.spec import Specialization
from kernel_specs.primitives.grouped_tiling import GroupedTiling
from kernel_specs.primitives.nvfp4_tiling import TILE_ROWS, TOKENS, StreamShape
from kernel_specs.skinny_gemm_bf16.tiling import Tiling

KV_BLOCK_BYTES = 4096  # of the paged attention's ring: 16 keys and values of one head


def resources(entries: Sequence[Entry], specializations: Mapping[str, Specialization]) -> dict[str, Mapping[str, Any]]:
    """By recipe: the kernel, registers, stack and local bytes a thread (spills show there), shared bytes a block.

    `specializations` by recipe. Empty where NVIDIA's disassembler is not installed.
    """
    if disassembler() is None:
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    for entry in entries:
        code = disassemble(entry.read_artifact(), str(entry.key))
        found[entry.key.recipe] = {
            "kernel": entry.key.kernel,
            "registers": code.registers,
            "stack_bytes": code.stack,
            "local_bytes": code.local,
            "shared_bytes": code.shared + dynamic_shared_bytes(specializations[entry.key.recipe]),
        }
    return found


def dynamic_shared_bytes(specialization: Specialization) -> int:
    """What a launch asks for beside what the machine code declares, by the kernel's tiling; barriers left out."""
    sizes: dict[str, Any] = {**specialization.axes, **specialization.statics}
    rings: Mapping[str, Callable[[], int]] = {
        "skinny_gemm_bf16": lambda: _skinny(sizes),
        "grouped_skinny_gemm_bf16": lambda: _skinny({**sizes, "weight_rows": sizes["out_features"]}),
        "bf16_grouped_gemm_swiglu": lambda: _grouped(sizes, sizes["moe_hidden_size"], sizes["intermediate_width"], 2),
        "bf16_grouped_gemm_partial": lambda: _grouped(sizes, sizes["intermediate_width"], sizes["moe_hidden_size"], 1),
        "nvfp4_grouped_gemm_swiglu": lambda: _streams(sizes, parts=2),
        "nvfp4_grouped_gemm_partial": lambda: _streams(sizes, parts=1),
        "paged_gqa_verify_attention": lambda: int(sizes["stages"] * sizes["tile_blocks"] * KV_BLOCK_BYTES),
    }
    ring = rings.get(specialization.name)
    return ring() if ring else 0


def _skinny(sizes: Mapping[str, Any]) -> int:
    return Tiling(**{name: sizes[name] for name in Tiling.__dataclass_fields__}).shared_bytes


def _streams(sizes: Mapping[str, Any], parts: int) -> int:
    """Every warp's ring, and twice the sums of all warps where ranges of K meet."""
    names = ("groups", "ranges", "row_warps", "stages", "ctas")
    shape = StreamShape(parts=parts, tiles=1, **{name: sizes[name] for name in names})
    meet = parts == 2 or shape.ranges > 1
    return shape.warps * (shape.ring_bytes + (2 * parts * TILE_ROWS * TOKENS * 4 if meet else 0))


def _grouped(sizes: Mapping[str, Any], in_features: int, out_features: int, parts: int) -> int:
    names = ("pass_rows", "tile_columns", "stages", "cta_tiles")
    chosen = {name: sizes[name] for name in names}
    return GroupedTiling(in_features=in_features, out_features=out_features, parts=parts, **chosen).shared_bytes
