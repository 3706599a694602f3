"""CuTe DSL kernel for `qk_rmsnorm_rope_paged_kv_append`: one CTA per token, eight lanes per head."""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.head_rows import (
    HEAD,
    LANES,
    VECTOR,
    append,
    load_angles,
    normed,
    rotate,
    sum_squares,
    threads_of,
)


def qk_rmsnorm_rope_paged_kv_append(
    num_heads: int, num_kv_heads: int, qkvg_size: int, rope: bool
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert qkvg_size == 2 * HEAD * (num_heads + num_kv_heads)
    first_value = num_heads + num_kv_heads
    rows = first_value + num_kv_heads  # the gate's heads are left alone
    threads = threads_of(rows)

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
            angles = load_angles(positions, cos_sin, token, part)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        head = cute.local_tile(qkvg[token, None], (VECTOR,), (vector,))
        stored = cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16)
        cute.autovec_copy(head, stored)
        values = stored.load().to(cutlass.Float32)
        square_sum = sum_squares(values)
        if row < first_value:
            turned = normed(values, square_sum, eps)
            if cutlass.const_expr(rope):
                turned = rotate(turned, angles)
            stored.store(turned.to(cutlass.BFloat16))
            cute.autovec_copy(stored, head)
        if row >= num_heads and row < rows and slot >= 0:
            append(kv_cache, slot, row - num_heads, num_kv_heads, part, stored)

    @cute.jit
    def host(*arguments) -> None:  # `positions` and `cos_sin` exist only with RoPE
        qkvg, *table, slot_mapping, kv_cache, eps, cuda_stream = arguments
        positions, cos_sin = table if rope else (None, None)
        device(qkvg, positions, cos_sin, slot_mapping, kv_cache, eps).launch(
            grid=(qkvg.shape[0], 1, 1), block=(threads, 1, 1), stream=cuda_stream, use_pdl=True
        )

    return host
