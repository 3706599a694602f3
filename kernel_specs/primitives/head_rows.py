"""Heads of 64 elements as rows of eight lanes: QK-norm, RoPE, and the append to a paged KV cache.

A lane owns eight neighbouring elements of a head, hence whole RoPE pairs; nothing goes through shared memory.
"""

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import WARP, butterfly
from kernel_specs.primitives.vector import dot, load_float32

HEAD = 64
VECTOR = 8
LANES = HEAD // VECTOR
PAIRS = VECTOR // 2
BLOCK_SIZE = 16

Angles = tuple[cute.TensorSSA, cute.TensorSSA]


def threads_of(heads: int) -> int:
    """Threads of a CTA that holds so many heads. Those of the last warp that are left over repeat its last head."""
    return -(-heads * LANES // WARP) * WARP


def load_angles(positions: cute.Tensor, cos_sin: cute.Tensor, token: cutlass.Int32, part: cutlass.Int32) -> Angles:
    """Cosines and sines of the pairs of lane `part` of a head, from the table's row of the token's position."""
    table_row = cos_sin[positions[token], None]
    return load_float32(table_row, (part,), PAIRS), load_float32(table_row, (part + LANES,), PAIRS)


def rotate(values: cute.TensorSSA, angles: Angles) -> cute.TensorSSA:
    """Pairs (2i, 2i + 1) turned by their angles."""
    cosines, sines = angles
    rotated = cute.make_rmem_tensor((VECTOR,), cutlass.Float32)
    for i in range(PAIRS):
        even, odd = values[2 * i], values[2 * i + 1]
        rotated[2 * i] = even * cosines[i] - odd * sines[i]
        rotated[2 * i + 1] = even * sines[i] + odd * cosines[i]
    return rotated.load()


def sum_squares(values: cute.TensorSSA) -> cutlass.Float32:
    """Over the head, of which the eight lanes call together."""
    return butterfly(dot(values, values), LANES)


def normed(values: cute.TensorSSA, square_sum: cutlass.Float32, eps: cutlass.Float32) -> cute.TensorSSA:
    return values * cute.math.rsqrt(square_sum / HEAD + eps, fastmath=True)


def append(
    kv_cache: cute.Tensor,
    slot: cutlass.Int64,
    row: cutlass.Int32,
    num_kv_heads: int,
    part: cutlass.Int32,
    stored: cute.Tensor,
) -> None:
    """Write one vector of K (rows below num_kv_heads) or V to its slot; addresses are 64 bit."""
    is_value = row // num_kv_heads
    packed = kv_cache[slot >> 4, row % num_kv_heads, slot & (BLOCK_SIZE - 1), None]
    cute.autovec_copy(stored, cute.local_tile(packed, (VECTOR,), (is_value * LANES + part,)))
