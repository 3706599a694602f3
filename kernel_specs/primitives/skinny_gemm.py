"""A GEMM of few tokens whose weights stream once through a ring in shared memory.

A CTA owns `tile_rows` weight rows and one of `split` ranges of K; the CTAs of a cluster own the same rows. A producer
warp keeps the ring full with bulk tensor copies. Consumer warps multiply: weights are the 16-row operand of the MMA,
8 tokens the other. Stages go to `column_warps` groups of warps in turn; within a group each of `row_warps` warps has
row blocks of its own. `primitives/partial_sums.py` adds up what the groups of a cluster have, and stores it.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from kernel_specs.primitives import mma
from kernel_specs.primitives.mma import LANES, ROW_BYTES, ROWS, TOKENS
from kernel_specs.primitives.partial_sums import ITEM, make_finish

BLOCK_COLUMNS = ROW_BYTES // 2  # of BF16: a row of a block
# L2 policies of the copies: a step reads a weight once, and the activations in many CTAs
EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000

Copy = tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]


def make_gemm(tile, groups: int = 1) -> Callable[..., None]:
    """The host function of a tiling: (activation, weight, out, stream).

    With `groups` > 1, activation [groups, tokens, K] and weight [groups, rows, K] meet group by group in
    out [tokens, groups * rows]; the tiling is that of all groups' rows, of which no tile belongs to two groups.
    """
    assert tile.row_tiles % groups == 0 and (groups == 1 or tile.halves == 1)
    max_tokens, tile_rows, split, stages = tile.max_tokens, tile.tile_rows, tile.split, tile.stages
    row_warps, column_warps = tile.row_warps, tile.column_warps
    in_features, out_features = tile.in_features, tile.out_features
    blocks, chunks, halves, token_tiles = tile.blocks, tile.chunks, tile.halves, tile.token_tiles
    warp_blocks, warp_items = tile.warp_blocks, tile.warp_items
    # with few independent sums, two accumulators each hide the MMA's latency
    chains = 2 if warp_items <= 2 else 1
    finish = make_finish(tile)

    def stage_shape(rows: int, parts: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides, in elements, of a stage in shared memory: (row, column, part, block)."""
        part = rows * BLOCK_COLUMNS
        return (rows, BLOCK_COLUMNS, parts, blocks), (BLOCK_COLUMNS, 1, part, parts * part)

    def copy_atom(source: cute.Tensor, rows: int, parts: int) -> tuple[cute.CopyAtom, cute.Tensor]:
        """The copy of a stage from `source`, whose modes are (row, column, part, block)."""
        shape, stride = stage_shape(rows, parts)
        layout = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, cute.make_layout(shape, stride=stride))
        return tuple(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, layout, shape))

    def partition(
        atom: cute.CopyAtom,
        source: cute.Tensor,
        ring: cute.Pointer,
        rows: int,
        parts: int,
        row_tile: cutlass.Int32 | int,
        part: cutlass.Int32 | int,
    ) -> Copy:
        """The atom, what a copy writes, (copy, stage), and what it reads, (copy, chunk of all K)."""
        shape, stride = stage_shape(rows, parts)
        layout = cute.make_layout((*shape, stages), stride=(*stride, parts * blocks * rows * BLOCK_COLUMNS))
        swizzled = cute.recast_ptr(ring, cute.make_swizzle(3, 4, 3), dtype=cutlass.BFloat16)
        target = cute.group_modes(cute.make_tensor(swizzled, layout), 0, 4)
        tiles = cute.group_modes(cute.local_tile(source, shape, (row_tile, 0, part, None)), 0, 4)
        return atom, *cpasync.tma_partition(atom, 0, cute.make_layout(1), target, tiles)

    @cute.jit
    def produce(
        weight_copy: Copy, activation_copy: Copy, full: cute.Pointer, empty: cute.Pointer, rank: cutlass.Int32
    ) -> None:
        """Fill the ring, wait for the previous launch, then refill each stage that is used up."""
        stage_bytes = tile.weight_stage + tile.activation_stage
        primed = min(stages, chunks)
        # Weights do not depend on the previous launch, activations do.
        for chunk in cutlass.range(primed, unroll=1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + chunk, stage_bytes)
            copy(weight_copy, rank * chunks + chunk, chunk, full, EVICT_FIRST)
        if cutlass.const_expr(split > 1):
            cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()
        for chunk in cutlass.range(primed, unroll=1):
            copy(activation_copy, rank * chunks + chunk, chunk, full, EVICT_NORMAL)
        for chunk in cutlass.range(primed, chunks, unroll=1):
            stage = chunk % stages
            cute.arch.mbarrier_wait(empty + stage, (chunk // stages - 1) % 2)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, stage_bytes)
            copy(weight_copy, rank * chunks + chunk, stage, full, EVICT_FIRST)
            copy(activation_copy, rank * chunks + chunk, stage, full, EVICT_NORMAL)

    def copy(stages_of: Copy, chunk: cutlass.Int32, stage: cutlass.Int32, full: cute.Pointer, policy: int) -> None:
        """Start the copy of a chunk of K into a stage."""
        atom, ring, source = stages_of
        target = ring[None, stage]
        cute.copy(atom, source[None, chunk], target, tma_bar_ptr=full + stage, cache_policy=cutlass.Int64(policy))

    def multiply_stage(
        sums: cute.Tensor,
        weights: cute.Pointer,
        activations: cute.Pointer,
        stage: cutlass.Int32,
        row_offset: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        for block, half in [(block, half) for block in range(blocks) for half in range(mma.HALVES)]:
            lane_offset = mma.chunk_offset(lane, half)
            start = stage * tile.activation_stage + block * max_tokens * ROW_BYTES + lane_offset
            columns = [mma.load_chunk(activations, start + t * TOKENS * ROW_BYTES) for t in range(token_tiles)]
            start = stage * tile.weight_stage + block * tile_rows * ROW_BYTES + row_offset + lane_offset
            for part, i in [(p, i) for p in range(halves) for i in range(warp_blocks)]:
                at = start + (part * tile.half_rows + i * ROWS) * ROW_BYTES
                low, high = mma.load_chunk(weights, at), mma.load_chunk(weights, at + 8 * ROW_BYTES)
                for t in range(token_tiles):
                    item = ((part * warp_blocks + i) * token_tiles + t) * ITEM
                    mma.mma_two_steps(sums, item, item + (chains - 1) * warp_items * ITEM, low, high, columns[t])

    @cute.jit
    def multiply(
        sums: cute.Tensor,
        weights: cute.Pointer,
        activations: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Add this warp's row blocks of the chunks of its group to `sums`."""
        row_offset = (warp % row_warps) * (warp_blocks * ROWS * ROW_BYTES)
        for chunk in cutlass.range(warp // row_warps, chunks, column_warps, unroll=1):
            stage = chunk % stages
            cute.arch.mbarrier_wait(full + stage, (chunk // stages) % 2)
            multiply_stage(sums, weights, activations, stage, row_offset, lane)
            if cutlass.const_expr(chunks > stages):
                # Loads in flight do not hold up the arrival: without the fence the next copy overtakes them.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(empty + stage)
        if cutlass.const_expr(chains == 2):
            for k in cutlass.range_constexpr(warp_items * ITEM):
                sums[k] = sums[k] + sums[warp_items * ITEM + k]

    @cute.jit
    def open_barriers(full: cute.Pointer, empty: cute.Pointer, arrived: cute.Pointer) -> None:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, row_warps)
            cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(split > 1):
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(arrived, tile.exchange)

    @cute.kernel
    def device(
        weight_atom: cute.CopyAtom,
        weight_source: cute.Tensor,
        activation_atom: cute.CopyAtom,
        activation_source: cute.Tensor,
        out: cute.Tensor,
    ) -> None:
        # the next launch may take what room is left and load its own weights
        cute.arch.griddepcontrol_launch_dependents()
        thread, _, _ = cute.arch.thread_idx()
        grid_block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        row_tile = grid_block // split
        rank = grid_block % split

        allocator = cutlass.memory.SmemAllocator()
        weights = allocator.allocate(tile.weight_ring, 1024)
        activations = allocator.allocate(stages * tile.activation_stage, 1024)
        partials = cute.recast_ptr(allocator.allocate(max(tile.exchange, 16), 128), dtype=cutlass.Float32)
        full = allocator.allocate_array(cutlass.Int64, stages)
        empty = allocator.allocate_array(cutlass.Int64, stages)
        arrived = allocator.allocate_array(cutlass.Int64, 1)

        if warp == tile.consumers:
            cpasync.prefetch_descriptor(weight_atom)
            cpasync.prefetch_descriptor(activation_atom)
            open_barriers(full, empty, arrived)
        if cutlass.const_expr(split > 1):
            cute.arch.cluster_arrive()
        else:
            cute.arch.sync_threads()

        if warp == tile.consumers:
            group = row_tile // (tile.row_tiles // groups) if cutlass.const_expr(groups > 1) else 0
            weight_copy = partition(weight_atom, weight_source, weights, tile.half_rows, halves, row_tile, 0)
            activation_copy = partition(activation_atom, activation_source, activations, max_tokens, 1, 0, group)
            produce(weight_copy, activation_copy, full, empty, rank)
        else:
            if cutlass.const_expr(split > 1):
                cute.arch.cluster_wait()
            sums = cute.make_rmem_tensor((chains * warp_items * ITEM,), cutlass.Float32)
            sums.fill(0.0)
            multiply(sums, weights, activations, full, empty, warp, thread % LANES)
            finish(sums, partials, arrived, out, row_tile, rank, warp, thread)

    def blocked(matrix: cute.Tensor, rows: cutlass.Int32, parts: int) -> cute.Tensor:
        """`matrix` [parts * rows, in_features] as (row, column, part, block)."""
        shape = (rows, BLOCK_COLUMNS, parts, in_features // BLOCK_COLUMNS)
        stride = (in_features, 1, rows * in_features, BLOCK_COLUMNS)
        return cute.make_tensor(matrix.iterator, cute.make_layout(shape, stride=stride))

    @cute.jit
    def host(activation: cute.Tensor, weight: cute.Tensor, out: cute.Tensor, stream: object) -> None:
        weight_atom, weight_source = copy_atom(blocked(weight, out_features, halves), tile.half_rows, halves)
        num_tokens = activation.shape[0] if cutlass.const_expr(groups == 1) else activation.shape[1]
        activation_atom, activation_source = copy_atom(blocked(activation, num_tokens, groups), max_tokens, 1)
        device(weight_atom, weight_source, activation_atom, activation_source, out).launch(
            grid=(tile.row_tiles * split, 1, 1),
            block=((tile.consumers + 1) * LANES, 1, 1),
            cluster=(split, 1, 1) if split > 1 else None,
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=100,
        )

    return host
