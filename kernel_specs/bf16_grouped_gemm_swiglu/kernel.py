"""CuTe DSL kernel for `bf16_grouped_gemm_swiglu`: the grouped GEMM with a gate and an up row per output."""

from collections.abc import Callable

from kernel_specs.primitives.grouped_gemm import make_grouped_gemm
from kernel_specs.primitives.grouped_tiling import GroupedTiling


def bf16_grouped_gemm_swiglu(
    num_experts_per_tok: int, moe_hidden_size: int, gate_up_rows: int, intermediate_width: int, **tiling: int
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert gate_up_rows == 2 * intermediate_width
    tile = GroupedTiling(in_features=moe_hidden_size, out_features=intermediate_width, parts=2, **tiling)
    return make_grouped_gemm(tile, num_experts_per_tok, rows_by_token=True)
