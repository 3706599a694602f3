"""CuTe DSL kernel for `bf16_grouped_gemm_partial`: the grouped GEMM over rows by route, without an epilogue."""

from collections.abc import Callable

from kernel_specs.primitives.grouped_gemm import make_grouped_gemm
from kernel_specs.primitives.grouped_tiling import GroupedTiling


def bf16_grouped_gemm_partial(
    num_experts_per_tok: int, moe_hidden_size: int, intermediate_width: int, rows_dtype: str, **tiling: int
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream.

    The rows come typed, so `rows_dtype` has nothing left to decide.
    """
    tile = GroupedTiling(in_features=intermediate_width, out_features=moe_hidden_size, parts=1, **tiling)
    return make_grouped_gemm(tile, num_experts_per_tok, rows_by_token=False)
