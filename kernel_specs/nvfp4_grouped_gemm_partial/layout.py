"""W2 from the checkpoint's order into this kernel's own, and back: tiles of 16 rows as in the first GEMM's layout."""

# ruff: noqa: INP001 - kernel folders are namespace packages

from torch import Tensor

from kernel_specs.nvfp4_grouped_gemm_swiglu.layout import repack, unpack


def repack_down(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """w2 [E, Hm, I / 2] and its scales [E, Hm, I / 16], uint8, as bytes per expert.

    Whole experts, or of every expert the slice of inner columns that this rank has (I / 2 and I / 16 counted for it).
    """
    return repack(codes, scales)


def unpack_down(codes: Tensor, scales: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The inverse of `repack_down`; `columns` are the rank's inner ones."""
    return unpack(codes, scales, columns)
