"""CuTe DSL kernel for `grouped_skinny_gemm_bf16`: `primitives/skinny_gemm.py` for stacked weights."""

from collections.abc import Callable

from kernel_specs.primitives.skinny_gemm import make_gemm
from kernel_specs.skinny_gemm_bf16.tiling import Tiling


def grouped_skinny_gemm_bf16(
    groups: int,
    group_rows: int,
    in_features: int,
    out_features: int,
    max_tokens: int,
    tile_rows: int,
    tile_columns: int,
    split: int,
    row_warps: int,
    column_warps: int,
    stages: int,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert groups * group_rows == out_features
    tile = Tiling(
        weight_rows=out_features,
        out_features=out_features,
        in_features=in_features,
        max_tokens=max_tokens,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        split=split,
        row_warps=row_warps,
        column_warps=column_warps,
        stages=stages,
    )
    return make_gemm(tile, groups)
