"""The grouped GEMM of both BF16 expert kernels: an expert's weights stream once through a ring in shared memory.

A CTA owns some tiles of 32 weight rows of one expert of the schedule. A producer warp keeps the ring full: the weights
with one bulk tensor copy per stage, the expert's rows, wherever they lie, with a bulk copy each. Every other warp
multiplies one 64-column block of each stage: weights are the 16-row operand of the MMA, 8 rows the other. After a tile
the warps' sums meet in shared memory, are added in a fixed order and stored at their routes.

Rows that a pass does not have are not copied: their columns of the products hold anything, and are not stored.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from kernel_specs.primitives import mma
from kernel_specs.primitives.grouped_finish import CHAINS, ITEM, make_finish
from kernel_specs.primitives.grouped_tiling import BLOCK_COLUMNS, LANES, ROW_BYTES, ROWS, TILE_ROWS, TOKENS
from kernel_specs.primitives.grouped_tiling import GroupedTiling as Tiling

# L2 policies of the copies: few rows need an expert's weights once, and rows are read by many CTAs
EVICT_FIRST = 0x12F0000000000000
EVICT_NORMAL = 0x1000000000000000

Copy = tuple[cute.CopyAtom, cute.Tensor, cute.Tensor]


def make_grouped_gemm(tile: Tiling, num_experts_per_tok: int, *, rows_by_token: bool) -> Callable[..., None]:
    """The host function of activation, weight, expert_ids, route_offsets, routes, out, first_expert, stream.

    `rows_by_token`: the activation has a row per token, else one per route. With two parts an output is
    silu(gate) * up. `out` has a row per route and is rounded once to its dtype.
    """
    k, parts, blocks, chunks, stages = num_experts_per_tok, tile.parts, tile.blocks, tile.chunks, tile.stages
    token_tiles, pass_rows, part_rows = tile.token_tiles, tile.pass_rows, tile.part_rows
    row_blocks = TILE_ROWS // ROWS
    sums_of_chain = row_blocks * token_tiles * ITEM
    consumers = blocks
    leave, store = make_finish(tile)
    weight_policy = EVICT_FIRST if pass_rows == TOKENS else EVICT_NORMAL  # more rows may need them again

    stage_shape = (part_rows, BLOCK_COLUMNS, parts, blocks, 1)
    block_elements = TILE_ROWS * BLOCK_COLUMNS
    stage_stride = (BLOCK_COLUMNS, 1, part_rows * BLOCK_COLUMNS, block_elements, blocks * block_elements)

    def by_experts(weight: cute.Tensor) -> cute.Tensor:
        """`weight` [experts, parts * out_features, in_features] as (row, column, part, block, expert)."""
        width, depth = tile.out_features, tile.in_features
        shape = (width, BLOCK_COLUMNS, parts, depth // BLOCK_COLUMNS, weight.shape[0])
        stride = (depth, 1, width * depth, BLOCK_COLUMNS, parts * width * depth)
        return cute.make_tensor(weight.iterator, cute.make_layout(shape, stride=stride))

    def copy_atom(source: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
        layout = cute.make_layout(stage_shape, stride=stage_stride)
        swizzled = cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, layout)
        return tuple(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), source, swizzled, stage_shape))

    def partition(atom: cute.CopyAtom, source: cute.Tensor, ring: cute.Pointer, expert: cutlass.Int32) -> Copy:
        """The atom, what a copy writes, (copy, stage), and what it reads, (copy, tile of the expert, chunk of K)."""
        layout = cute.make_layout((*stage_shape, stages), stride=(*stage_stride, blocks * block_elements))
        swizzled = cute.recast_ptr(ring, cute.make_swizzle(3, 4, 3), dtype=cutlass.BFloat16)
        target = cute.group_modes(cute.make_tensor(swizzled, layout), 0, 5)
        tiles = cute.group_modes(cute.local_tile(source, stage_shape, (None, 0, 0, None, expert)), 0, 5)
        return atom, *cpasync.tma_partition(atom, 0, cute.make_layout(1), target, tiles)

    def copy_weights(
        copies: Copy, row_tile: cutlass.Int32, chunk: cutlass.Int32, stage: cutlass.Int32, full: cute.Pointer
    ) -> None:
        atom, ring, source = copies
        policy = cutlass.Int64(weight_policy)
        cute.copy(atom, source[None, row_tile, chunk], ring[None, stage], tma_bar_ptr=full + stage, cache_policy=policy)

    @cute.jit
    def produce(
        copies: Copy,
        activation: cute.Tensor,
        routes: cute.Tensor,
        activations: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        first_tile: cutlass.Int32,
        first_route: cutlass.Int32,
        count: cutlass.Int32,
        passes: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Fill each stage when it is used up: pass after pass of a tile, tile after tile."""
        for work in cutlass.range(tile.cta_tiles * passes, unroll=1):
            row_tile = first_tile + work // passes
            first_row = work % passes * pass_rows
            rows = cutlass.min(count - first_row, pass_rows)
            # lanes without a row of their own read a route that exists, and copy nothing
            row = routes[first_route + first_row + cutlass.min(lane, rows - 1)]
            if cutlass.const_expr(rows_by_token):
                row = row // k
            for chunk in cutlass.range(chunks, unroll=1):
                step = work * chunks + chunk
                stage = step % stages
                if step >= stages:
                    cute.arch.mbarrier_wait(empty + stage, (step // stages - 1) % 2)
                with cute.arch.elect_one():
                    num_bytes = tile.weight_stage + rows * tile.activation_row
                    cute.arch.mbarrier_arrive_and_expect_tx(full + stage, num_bytes)
                cute.arch.sync_warp()
                copy_weights(copies, row_tile, chunk, stage, full)
                if lane < rows:
                    source = activation.iterator + cute.assume(
                        row * tile.in_features + chunk * tile.tile_columns, tile.tile_columns
                    )
                    target = activations + cute.assume(stage * tile.activation_stage + lane * tile.activation_pitch, 16)
                    bulk_copy(target, source, tile.activation_row, full + stage)

    @cute.jit
    def multiply_tokens(
        sums: cute.Tensor,
        activations: cute.Pointer,
        start: cutlass.Int32,
        rows: cutlass.Int32,
        weights: list[tuple[mma.Words, mma.Words]],
        t: cutlass.Constexpr,
    ) -> None:
        """Add the products of the lane's weights with token tile `t`, unless the pass does not reach it."""
        if rows > t * TOKENS:
            columns = mma.load_chunk(activations, start + t * TOKENS * tile.activation_pitch)
            for i in cutlass.range_constexpr(row_blocks):
                item = (i * token_tiles + t) * ITEM
                mma.mma_two_steps(sums, item, item + sums_of_chain, weights[i][0], weights[i][1], columns)

    def multiply_stage(
        sums: cute.Tensor,
        weights: cute.Pointer,
        activations: cute.Pointer,
        stage: cutlass.Int32,
        rows: cutlass.Int32,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """The warp's block of a stage."""
        row_start = stage * tile.activation_stage + mma.fragment_row(lane) * tile.activation_pitch + warp * ROW_BYTES
        for half in range(mma.HALVES):
            at = stage * tile.weight_stage + warp * (TILE_ROWS * ROW_BYTES) + mma.chunk_offset(lane, half)
            loaded = []
            for i in range(row_blocks):
                low = mma.load_chunk(weights, at + i * ROWS * ROW_BYTES)
                high = mma.load_chunk(weights, at + (i * ROWS + 8) * ROW_BYTES)
                loaded.append((low, high))
            start = row_start + (lane % 4 + half * 4) * 16
            for t in range(token_tiles):
                multiply_tokens(sums, activations, start, rows, loaded, t)

    @cute.jit
    def consume(
        weights: cute.Pointer,
        activations: cute.Pointer,
        partials: cute.Pointer,
        full: cute.Pointer,
        empty: cute.Pointer,
        out: cute.Tensor,
        routes: cute.Tensor,
        first_tile: cutlass.Int32,
        first_route: cutlass.Int32,
        count: cutlass.Int32,
        passes: cutlass.Int32,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Multiply the warp's block of every stage in the order in which they are filled."""
        sums = cute.make_rmem_tensor((CHAINS * sums_of_chain,), cutlass.Float32)
        for work in cutlass.range(tile.cta_tiles * passes, unroll=1):
            first_row = work % passes * pass_rows
            rows = cutlass.min(count - first_row, pass_rows)
            sums.fill(0.0)
            for chunk in cutlass.range(chunks, unroll=1):
                step = work * chunks + chunk
                stage = step % stages
                cute.arch.mbarrier_wait(full + stage, step // stages % 2)
                multiply_stage(sums, weights, activations, stage, rows, warp, lane)
                # Loads in flight do not hold up the arrival: without the fence the next copy overtakes them.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(empty + stage)
            leave(sums, partials, warp, lane)
            cute.arch.barrier(barrier_id=1, number_of_threads=consumers * LANES)
            row_tile = first_tile + work // passes
            store(partials, out, routes, first_route + first_row, rows, row_tile, warp * LANES + lane)
            # all have read the sums before the next ones come
            cute.arch.barrier(barrier_id=1, number_of_threads=consumers * LANES)

    @cute.jit
    def open_barriers(full: cute.Pointer, empty: cute.Pointer) -> None:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, consumers)
        cute.arch.mbarrier_init_fence()

    @cute.kernel
    def device(
        weight_atom: cute.CopyAtom,
        weight_source: cute.Tensor,
        activation: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        out: cute.Tensor,
        num_local_experts: cutlass.Int32,
        first_expert: cutlass.Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        row_group, number, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        lane = thread % LANES
        allocator = cutlass.memory.SmemAllocator()
        weights = allocator.allocate(stages * tile.weight_stage, 1024)
        activations = allocator.allocate(stages * tile.activation_stage, 128)
        partials = cute.recast_ptr(allocator.allocate(tile.partials, 128), dtype=cutlass.Float32)
        full = allocator.allocate_array(cutlass.Int64, stages)
        empty = allocator.allocate_array(cutlass.Int64, stages)
        if warp == consumers:
            cpasync.prefetch_descriptor(weight_atom)
            open_barriers(full, empty)
        cute.arch.sync_threads()
        # Which weights to load comes from an earlier launch. A launch that is triggered here may rely on that one.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        expert = expert_ids[number] - first_expert
        first_route = route_offsets[number]
        count = route_offsets[number + 1] - first_route
        if count > 0 and expert >= 0 and expert < num_local_experts:
            passes = (count + (pass_rows - 1)) // pass_rows
            first_tile = row_group * tile.cta_tiles
            if warp == consumers:
                copies = partition(weight_atom, weight_source, weights, expert)
                produce(
                    copies, activation, routes, activations, full, empty, first_tile, first_route, count, passes, lane
                )
            else:
                consume(
                    weights, activations, partials, full, empty, out, routes, first_tile, first_route, count, passes,
                    warp, lane,
                )  # fmt: skip

    @cute.jit
    def host(
        activation: cute.Tensor,
        weight: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        out: cute.Tensor,
        first_expert: cutlass.Int32,
        stream: object,
    ) -> None:
        num_routes = routes.shape[0] * k
        by_route = cute.make_layout((num_routes, tile.out_features), stride=(tile.out_features, 1))
        weight_atom, weight_source = copy_atom(by_experts(weight))
        device(
            weight_atom,
            weight_source,
            activation,
            expert_ids,
            route_offsets,
            cute.make_tensor(routes.iterator, cute.make_layout(num_routes)),
            cute.make_tensor(out.iterator, by_route),
            weight.shape[0],
            first_expert,
        ).launch(
            grid=(tile.row_groups, cutlass.min(expert_ids.shape[0], num_routes), 1),
            block=((consumers + 1) * LANES, 1, 1),
            stream=stream,
            use_pdl=True,
            preferred_smem_carveout=100,
        )

    return host


def bulk_copy(target: cute.Pointer, source: cute.Pointer, num_bytes: int, full: cute.Pointer) -> None:
    """Global to shared memory; `full` counts the bytes."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[{$r0}], [{$r1}], {$r2}, [{$r3}], {$r4};",
        read_only_args=[
            target.toint(), source.toint(), cutlass.Int32(num_bytes), full.toint(), cutlass.Int64(EVICT_NORMAL),
        ],
    )  # fmt: skip
