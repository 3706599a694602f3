"""CuTe DSL kernel for `qk_rmsnorm_rope_paged_kv_append`: one CTA per token, eight lanes per head.

A lane owns eight neighbouring elements of a head, hence whole RoPE pairs; nothing goes through shared memory.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import WARP, butterfly
from kernel_specs.primitives.vector import dot, load_float32

HEAD = 64
VECTOR = 8
LANES = HEAD // VECTOR
PAIRS = VECTOR // 2
BLOCK_SIZE = 16


def qk_rmsnorm_rope_paged_kv_append(
    num_heads: int, num_kv_heads: int, qkvg_size: int, rope: bool
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert qkvg_size == 2 * HEAD * (num_heads + num_kv_heads)
    first_value = num_heads + num_kv_heads
    rows = first_value + num_kv_heads  # the gate's heads are left alone
    threads = -(-rows * LANES // WARP) * WARP

    @cute.kernel
    def device(
        qkvg: cute.Tensor,
        positions: cute.Tensor | None,
        cos_sin: cute.Tensor | None,
        slot_mapping: cute.Tensor,
        kv_cache: cute.Tensor,
        eps: cutlass.Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        part = thread % LANES
        row = thread // LANES
        # Surplus lanes of the last warp repeat its last row, so that all lanes can take part in the shuffles.
        vector = cutlass.min(row, rows - 1) * LANES + part

        # Step inputs, written before the step's first launch: two dependent latencies pass before the wait.
        slot = slot_mapping[token]
        if cutlass.const_expr(rope):
            table_row = cos_sin[positions[token], None]
            cosines = load_float32(table_row, (part,), PAIRS)
            sines = load_float32(table_row, (part + LANES,), PAIRS)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        head = cute.local_tile(qkvg[token, None], (VECTOR,), (vector,))
        stored = cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16)
        cute.autovec_copy(head, stored)
        values = stored.load().to(cutlass.Float32)
        square_sum = butterfly(dot(values, values), LANES)
        if row < first_value:
            normed = values * cute.math.rsqrt(square_sum / HEAD + eps, fastmath=True)
            if cutlass.const_expr(rope):
                normed = _rotate(normed, cosines, sines)
            stored.store(normed.to(cutlass.BFloat16))
            cute.autovec_copy(stored, head)
        if row >= num_heads and row < rows and slot >= 0:
            _append(kv_cache, slot, row - num_heads, part, stored)

    @cute.jit
    def _append(
        kv_cache: cute.Tensor,
        slot: cutlass.Int64,
        row: cutlass.Int32,
        part: cutlass.Int32,
        stored: cute.Tensor,
    ) -> None:
        """Write one vector of K (rows below num_kv_heads) or V to its slot; addresses are 64 bit."""
        is_value = row // num_kv_heads
        packed = kv_cache[slot >> 4, row % num_kv_heads, slot & (BLOCK_SIZE - 1), None]
        cute.autovec_copy(stored, cute.local_tile(packed, (VECTOR,), (is_value * LANES + part,)))

    @cute.jit
    def host(*arguments) -> None:  # `positions` and `cos_sin` exist only with RoPE
        qkvg, *table, slot_mapping, kv_cache, eps, cuda_stream = arguments
        positions, cos_sin = table if rope else (None, None)
        device(qkvg, positions, cos_sin, slot_mapping, kv_cache, eps).launch(
            grid=(qkvg.shape[0], 1, 1), block=(threads, 1, 1), stream=cuda_stream, use_pdl=True
        )

    return host


def _rotate(values: cute.TensorSSA, cosines: cute.TensorSSA, sines: cute.TensorSSA) -> cute.TensorSSA:
    """Pairs (2i, 2i + 1) turned by their angles."""
    rotated = cute.make_rmem_tensor((VECTOR,), cutlass.Float32)
    for i in range(PAIRS):
        even, odd = values[2 * i], values[2 * i + 1]
        rotated[2 * i] = even * cosines[i] - odd * sines[i]
        rotated[2 * i + 1] = even * sines[i] + odd * cosines[i]
    return rotated.load()
