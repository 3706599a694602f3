"""CuTe DSL kernel for `context_kv_precompute_append`: a CTA per row and layer, eight lanes per head.

A lane owns eight neighbouring elements of a head, hence whole RoPE pairs; nothing goes through shared memory.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import WARP, butterfly
from kernel_specs.primitives.vector import dot, load_float32, round_bfloat16

HEAD = 64
VECTOR = 8
LANES = HEAD // VECTOR
PAIRS = VECTOR // 2
BLOCK_SIZE = 16


def context_kv_precompute_append(num_kv_heads: int, kv_size: int, rope: bool, num_layers: int) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert kv_size == 2 * HEAD * num_kv_heads * num_layers
    rows = 2 * num_kv_heads  # heads of a layer: keys, then values
    threads = -(-rows * LANES // WARP) * WARP

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
            table_row = cos_sin[positions[token], None]
            cosines = load_float32(table_row, (part,), PAIRS)
            sines = load_float32(table_row, (part + LANES,), PAIRS)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        head = cute.local_tile(kv[token, None], (VECTOR,), ((layer * rows + row) * LANES + part,))
        stored = cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16)
        cute.autovec_copy(head, stored)
        values = stored.load().to(cutlass.Float32)
        square_sum = butterfly(dot(values, values), LANES)
        if row < num_kv_heads:
            normed = values * cute.math.rsqrt(square_sum / HEAD + eps, fastmath=True)
            if cutlass.const_expr(rope):
                normed = _rotate(round_bfloat16(normed), cosines, sines)
            stored.store(normed.to(cutlass.BFloat16))
        if thread < rows * LANES and slot >= 0:
            for i in cutlass.range_constexpr(num_layers):
                if layer == i:
                    _append(kv_caches[i], slot, row, part, stored)

    @cute.jit
    def _append(
        kv_cache: cute.Tensor, slot: cutlass.Int64, row: cutlass.Int32, part: cutlass.Int32, stored: cute.Tensor
    ) -> None:
        """Write one vector of K (rows below num_kv_heads) or V to its slot; addresses are 64 bit."""
        is_value = row // num_kv_heads
        packed = kv_cache[slot >> 4, row % num_kv_heads, slot & (BLOCK_SIZE - 1), None]
        cute.autovec_copy(stored, cute.local_tile(packed, (VECTOR,), (is_value * LANES + part,)))

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


def _rotate(values: cute.TensorSSA, cosines: cute.TensorSSA, sines: cute.TensorSSA) -> cute.TensorSSA:
    """Pairs (2i, 2i + 1) turned by their angles."""
    rotated = cute.make_rmem_tensor((VECTOR,), cutlass.Float32)
    for i in range(PAIRS):
        even, odd = values[2 * i], values[2 * i + 1]
        rotated[2 * i] = even * cosines[i] - odd * sines[i]
        rotated[2 * i + 1] = even * sines[i] + odd * cosines[i]
    return rotated.load()
