"""Vectors of a row in registers: wide loads and stores, FP32 arithmetic in between.

A row is a 1-D tensor of static size; its vector `i` is the elements [i * width, (i + 1) * width). A thread may own
several vectors; in registers they are one, in order.
"""

import cutlass
from cutlass import cute


def load_float32(row: cute.Tensor, vectors: tuple[cutlass.Int32, ...], width: int) -> cute.TensorSSA:
    """These vectors of `row`, widened to FP32."""
    fragment = cute.make_rmem_tensor((width * len(vectors),), row.element_type)
    for i, vector in enumerate(vectors):
        cute.autovec_copy(cute.local_tile(row, (width,), (vector,)), cute.local_tile(fragment, (width,), (i,)))
    return fragment.load().to(cutlass.Float32)


def store_rounded(row: cute.Tensor, vectors: tuple[cutlass.Int32, ...], values: cute.TensorSSA) -> None:
    """Store FP32 `values` as these vectors of `row`, rounded once (to nearest even) to the row's dtype."""
    width = cute.size(values.shape) // len(vectors)
    fragment = cute.make_rmem_tensor((width * len(vectors),), row.element_type)
    fragment.store(values.to(row.element_type))
    for i, vector in enumerate(vectors):
        cute.autovec_copy(cute.local_tile(fragment, (width,), (i,)), cute.local_tile(row, (width,), (vector,)))


def round_bfloat16(values: cute.TensorSSA) -> cute.TensorSSA:
    """FP32 values that are exact in BF16: a documented rounding point in the middle of a formula."""
    return values.to(cutlass.BFloat16).to(cutlass.Float32)


def dot(left: cute.TensorSSA, right: cute.TensorSSA) -> cutlass.Float32:
    """The sum of this thread's products in a fixed order: even and odd elements in two chains, half as long each."""
    even, odd = left[0] * right[0], left[1] * right[1]
    for i in range(2, cute.size(left.shape), 2):
        even = left[i] * right[i] + even
        odd = left[i + 1] * right[i + 1] + odd
    return even + odd
