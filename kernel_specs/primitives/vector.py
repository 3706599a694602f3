"""Row vectors in registers: 16-byte loads and stores, FP32 arithmetic in between.

A row is a 1-D tensor with a static size; vector `index` of it is its elements [index * width, (index + 1) * width).
"""

import cutlass
from cutlass import cute


def load_float32(row: cute.Tensor, index: cutlass.Int32, width: int) -> cute.TensorSSA:
    """Vector `index` of `row`, widened to FP32."""
    fragment = cute.make_rmem_tensor((width,), row.element_type)
    cute.autovec_copy(cute.local_tile(row, (width,), (index,)), fragment)
    return fragment.load().to(cutlass.Float32)


def store_rounded(row: cute.Tensor, index: cutlass.Int32, values: cute.TensorSSA) -> None:
    """Store FP32 `values` as vector `index` of `row`, rounded once (to nearest even) to the row's dtype."""
    width = cute.size(values.shape)
    fragment = cute.make_rmem_tensor((width,), row.element_type)
    fragment.store(values.to(row.element_type))
    cute.autovec_copy(fragment, cute.local_tile(row, (width,), (index,)))


def round_bfloat16(values: cute.TensorSSA) -> cute.TensorSSA:
    """FP32 values that are exact in BF16: a documented rounding point in the middle of a formula."""
    return values.to(cutlass.BFloat16).to(cutlass.Float32)


def dot(left: cute.TensorSSA, right: cute.TensorSSA) -> cutlass.Float32:
    """The sum of this thread's products, in a fixed order."""
    return (left * right).reduce(cute.ReductionOp.ADD, 0.0, 0)
