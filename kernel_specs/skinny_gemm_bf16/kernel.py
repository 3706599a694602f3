"""CuTe DSL kernel for `skinny_gemm_bf16`: `primitives/skinny_gemm.py` for one weight."""

from collections.abc import Callable

from kernel_specs.primitives.skinny_gemm import make_gemm
from kernel_specs.skinny_gemm_bf16.tiling import Tiling


def skinny_gemm_bf16(
    weight_rows: int,
    out_features: int,
    in_features: int,
    epilogue: str,
    max_tokens: int,
    tile_rows: int,
    tile_columns: int,
    split: int,
    row_warps: int,
    column_warps: int,
    stages: int,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    tile = Tiling(
        weight_rows=weight_rows,
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
    assert tile.halves == (2 if epilogue == "silu_mul" else 1)
    return make_gemm(tile)
