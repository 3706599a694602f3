"""CuTe DSL kernel for `context_kv_precompute_append`: a CTA per row and layer, eight lanes per head."""

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
from kernel_specs.primitives.vector import round_bfloat16


def context_kv_precompute_append(num_kv_heads: int, kv_size: int, rope: bool, num_layers: int) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert kv_size == 2 * HEAD * num_kv_heads * num_layers
    rows = 2 * num_kv_heads  # heads of a layer: keys, then values
    threads = threads_of(rows)

    @cute.kernel
    def device(
        kv: cute.Tensor,
        positions: cute.Tensor | None,
        cos_sin: cute.Tensor | None,
        slot_mappings: list[cute.Tensor],
        kv_caches: list[cute.Tensor],
        eps: cutlass.Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        token, layer, _ = cute.arch.block_idx()
        part = thread % LANES
        # Surplus lanes of the last warp repeat its last row, so that all lanes can take part in the shuffles.
        row = cutlass.min(thread // LANES, rows - 1)

        # Step inputs, written before the step's first launch: two dependent latencies pass before the wait.
        slot = cutlass.Int64(-1)
        for i in cutlass.range_constexpr(num_layers):
            if layer == i:
                slot = slot_mappings[i][token]
        if cutlass.const_expr(rope):
            angles = load_angles(positions, cos_sin, token, part)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        head = cute.local_tile(kv[token, None], (VECTOR,), ((layer * rows + row) * LANES + part,))
        stored = cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16)
        cute.autovec_copy(head, stored)
        values = stored.load().to(cutlass.Float32)
        square_sum = sum_squares(values)
        if row < num_kv_heads:
            key = normed(values, square_sum, eps)
            if cutlass.const_expr(rope):
                key = rotate(round_bfloat16(key), angles)
            stored.store(key.to(cutlass.BFloat16))
        if thread < rows * LANES and slot >= 0:
            for i in cutlass.range_constexpr(num_layers):
                if layer == i:
                    append(kv_caches[i], slot, row, num_kv_heads, part, stored)

    @cute.jit
    def host(*arguments) -> None:  # `positions` and `cos_sin` exist only with RoPE
        kv, *table, eps, cuda_stream = arguments
        first = len(table) - 2 * num_layers
        slot_mappings, kv_caches = table[first : first + num_layers], table[first + num_layers :]
        positions, cos_sin = table[:2] if rope else (None, None)
        device(kv, positions, cos_sin, slot_mappings, kv_caches, eps).launch(
            grid=(kv.shape[0], num_layers, 1), block=(threads, 1, 1), stream=cuda_stream, use_pdl=True
        )

    return host
