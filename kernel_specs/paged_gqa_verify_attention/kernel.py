"""CuTe DSL kernel for `paged_gqa_verify_attention`: one CTA per split, KV head and request.

A producer warp copies whole cache blocks into a ring of tiles in shared memory. Consumer warps own `warp_tiles` 16-row
tiles of the packed query rows and every `key_groups`-th tile of keys; each has a softmax of its own, and the key
groups' results meet in shared memory.
"""

import operator
from collections.abc import Callable

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from kernel_specs.primitives.attention_tiling import HEAD, LANES, Tiling, divided, split_blocks
from kernel_specs.primitives.online_softmax import NOTHING, consume, load_queries, over_quad
from kernel_specs.primitives.paged_ring import bring_closer, copy_atom, produce
from kernel_specs.primitives.split_results import merge_groups, store

LOG2_E = 1.4426950408889634


def paged_gqa_verify_attention(
    query_length: int,
    num_heads: int,
    num_kv_heads: int,
    qkvg_size: int,
    sliding_window: int,
    tile_blocks: int,
    stages: int,
    warp_tiles: int,
    key_groups: int,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert qkvg_size == 2 * HEAD * (num_heads + num_kv_heads)
    group = num_heads // num_kv_heads
    tiling = Tiling(query_length, group, sliding_window, tile_blocks, stages, warp_tiles, key_groups)

    @cute.kernel
    def device(
        atom: cute.CopyAtom,
        cache: cute.Tensor,
        qkvg: cute.Tensor,
        kv_cache: cute.Tensor,
        block_table: cute.Tensor,
        seq_lens: cute.Tensor,
        partial_max: cute.Tensor,
        partial_sum: cute.Tensor,
        partial_out: cute.Tensor,
        softmax_scale: cutlass.Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        split, kv_head, request = cute.arch.block_idx()
        splits, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(thread >> 5)
        lane = thread & (LANES - 1)
        cute.arch.griddepcontrol_launch_dependents()

        allocator = cutlass.memory.SmemAllocator()
        ring = allocator.allocate(stages * tiling.tile_bytes, 1024)
        full = allocator.allocate_array(cutlass.Int64, stages)
        empty = allocator.allocate_array(cutlass.Int64, stages)
        if warp == tiling.consumers:
            cpasync.prefetch_descriptor(atom)
            with cute.arch.elect_one():
                for stage in cutlass.range_constexpr(stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, tiling.row_warps)
            cute.arch.mbarrier_init_fence()
        seq_len = seq_lens[request]
        first, last = split_blocks(tiling, seq_len, split, splits)
        table = block_table[request, None]
        scale = softmax_scale * LOG2_E
        cute.arch.sync_threads()

        if warp == tiling.consumers:
            if first < last:
                produce(tiling, atom, cache, ring, full, empty, table, first, last, kv_head, lane)
        else:
            if first < last:
                bring_closer(tiling, kv_cache, table, first, last, kv_head, warp, lane)
            key_group = divided(warp, tiling.row_warps)
            row_warp = warp - key_group * tiling.row_warps
            maxima = cute.make_rmem_tensor((tiling.slots,), cutlass.Float32)
            sums = cute.make_rmem_tensor((tiling.slots,), cutlass.Float32)
            outputs = cute.make_rmem_tensor((tiling.quads * 4,), cutlass.Float32)
            maxima.fill(NOTHING)
            sums.fill(0.0)
            outputs.fill(0.0)
            cute.arch.griddepcontrol_wait()
            queries = load_queries(tiling, qkvg, request, kv_head, row_warp, lane)
            consume(
                tiling, queries, maxima, sums, outputs, ring, full, empty,
                seq_len, first, last, scale, row_warp, key_group, lane,
            )  # fmt: skip
            for slot in cutlass.range_constexpr(tiling.slots):
                sums[slot] = over_quad(operator.add, sums[slot])
            if cutlass.const_expr(key_groups > 1):
                merge_groups(tiling, maxima, sums, outputs, ring, scale, row_warp, key_group, lane)
            if key_group == 0:
                store(
                    tiling, maxima, sums, outputs, partial_max, partial_sum, partial_out,
                    scale, split, kv_head, request, row_warp, lane,
                )  # fmt: skip

    @cute.jit
    def host(
        qkvg: cute.Tensor,
        kv_cache: cute.Tensor,
        block_table: cute.Tensor,
        seq_lens: cute.Tensor,
        partial_max: cute.Tensor,
        partial_sum: cute.Tensor,
        partial_out: cute.Tensor,
        softmax_scale: cutlass.Float32,
        stream: object,
    ) -> None:
        atom, cache = copy_atom(kv_cache)
        device(
            atom, cache, qkvg, kv_cache, block_table, seq_lens, partial_max, partial_sum, partial_out, softmax_scale
        ).launch(
            grid=(partial_out.shape[2], num_kv_heads, seq_lens.shape[0]),
            block=((tiling.consumers + 1) * LANES, 1, 1),
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=100,
        )

    return host
