"""CuTe DSL kernel for `nvfp4_grouped_gemm_partial`: streams of row tiles, a warp per range of K.

Where one warp has all of K, as at TP 8, it stores its sums from registers. Otherwise the ranges' sums meet in shared
memory, where the next tile's sums have places of their own.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.nvfp4 import ITEM, TILE_SUMS, UNSCALE, TokenOperands, add_ranges, leave, place
from kernel_specs.primitives.nvfp4_stream import make_stream
from kernel_specs.primitives.nvfp4_tiling import LANES, TILE_ROWS, TOKENS, StreamShape

OUTPUTS = TILE_ROWS * TOKENS  # of a tile
BUFFERS = 2


def nvfp4_grouped_gemm_partial(
    moe_hidden_size: int,
    packed_width: int,
    width_blocks: int,
    expert_code_bytes: int,
    expert_scale_bytes: int,
    num_experts_per_tok: int,
    groups: int,
    ranges: int,
    row_warps: int,
    stages: int,
    ctas: int,
    rows_dtype: str,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    shape = StreamShape(groups, ranges, 1, moe_hidden_size // TILE_ROWS, row_warps, stages, ctas)
    team = ranges * LANES  # threads of a stream
    assert num_experts_per_tok > 0
    assert ranges * groups * 64 == packed_width * 2 == width_blocks * 16
    assert expert_code_bytes == moe_hidden_size // TILE_ROWS * ranges * shape.code_bytes
    assert expert_scale_bytes == moe_hidden_size // TILE_ROWS * ranges * shape.scale_bytes
    element = {"float32": cutlass.Float32, "bfloat16": cutlass.BFloat16}[rows_dtype]

    def load_tokens(
        context: tuple, start: cutlass.Int32, last: cutlass.Int32, k_range: cutlass.Int32, lane: cutlass.Int32
    ) -> TokenOperands:
        """The lane's blocks of its route's row; surplus ones repeat the last route, and are not stored."""
        _, codes, scales, _, routes, _ = context
        route = routes[cutlass.min(start + lane // 4, last - 1)]
        block = (k_range * 4 + lane % 4) * groups
        code = cute.assume(route * packed_width + block * 8, 16)
        scale = cute.assume(route * width_blocks + block, groups)
        return TokenOperands(codes.iterator + code, scales.iterator + scale, groups)

    @cute.jit
    def store_own(
        context: tuple,
        sums: cute.Tensor,
        expert: cutlass.Int32,
        start: cutlass.Int32,
        last: cutlass.Int32,
        tile: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Rows lane / 4 and 8 more of two tokens: the lane has their whole sums."""
        _, _, _, down_scales, routes, rows = context
        scale = down_scales[expert]
        column = tile * TILE_ROWS + lane // 4
        for i in cutlass.range_constexpr(2):
            position = start + lane % 4 * 2 + i
            if position < last:
                route = routes[position]
                for half in cutlass.range_constexpr(2):
                    # + 0.0: a sum of zeros is +0
                    value = (sums[half * 2 + i] + 0.0) * UNSCALE * scale
                    rows[column + half * 8, route] = value.to(element)

    @cute.jit
    def store_met(
        context: tuple,
        sums: cute.Tensor,
        expert: cutlass.Int32,
        start: cutlass.Int32,
        last: cutlass.Int32,
        tile: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """Neighbouring threads store neighbouring columns."""
        _, _, _, down_scales, routes, rows = context
        scale = down_scales[expert]
        for step in cutlass.range_constexpr(-(-OUTPUTS // team)):
            element_number = thread + step * team
            row, token = element_number % TILE_ROWS, element_number // TILE_ROWS
            if element_number < OUTPUTS and start + token < last:
                value = add_ranges(sums, place(row, token), ranges, TILE_SUMS) * scale
                rows[tile * TILE_ROWS + row, routes[start + token]] = value.to(element)

    def deliver(
        context: tuple,
        sums: cute.Tensor,
        part: int,
        expert: cutlass.Int32,
        start: cutlass.Int32,
        last: cutlass.Int32,
        tile: cutlass.Int32,
        job: cutlass.Int32,
        k_range: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Store the sums, or put them where those of all ranges meet."""
        assert part == 0
        if ranges == 1:
            store_own(context, sums, expert, start, last, tile, lane)
            return
        thread, _, _ = cute.arch.thread_idx()
        row = cutlass.Int32(0) if row_warps == 1 else thread // team
        buffer = (job % BUFFERS * row_warps + row) * (ranges * TILE_SUMS)
        start_of_sums = context[0] + cute.assume(buffer, TILE_SUMS)
        leave(sums, 0, start_of_sums + cute.assume(k_range * TILE_SUMS, TILE_SUMS), lane)
        cute.arch.barrier(barrier_id=row + 1, number_of_threads=team)
        met = cute.make_tensor(start_of_sums, cute.make_layout(ranges * TILE_SUMS))
        turned = (thread % team + job % BUFFERS * OUTPUTS) % team if team > OUTPUTS else thread % team
        store_met(context, met, expert, start, last, tile, turned)

    run = make_stream(shape, expert_code_bytes, expert_scale_bytes, load_tokens, deliver)

    @cute.kernel
    def device(
        codes: cute.Tensor,
        scales: cute.Tensor,
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        down_scales: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        rows: cute.Tensor,
        first_expert: cutlass.Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // LANES), thread % LANES
        allocator = cutlass.memory.SmemAllocator()
        ring = allocator.allocate(shape.warps * shape.ring_bytes, 128)
        meeting = BUFFERS * shape.warps * TILE_SUMS if ranges > 1 else ITEM
        sums = allocator.allocate_array(cutlass.Float32, meeting)
        full = allocator.allocate_array(cutlass.Int64, shape.warps * stages)
        num_routes = cute.size(routes)
        context = (
            sums,
            codes,
            scales,
            down_scales,
            cute.make_tensor(routes.iterator, cute.make_layout(num_routes)),
            cute.make_tensor(rows.iterator, cute.make_layout((moe_hidden_size, num_routes))),
        )
        run(
            context, weight, weight_scales, expert_ids, route_offsets, first_expert,
            ring + cute.assume(warp * shape.ring_bytes, 64), full + warp * stages, block * row_warps + warp // ranges,
            warp % ranges, lane,
        )  # fmt: skip

    @cute.jit
    def host(
        codes: cute.Tensor,
        scales: cute.Tensor,
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        down_scales: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        rows: cute.Tensor,
        first_expert: cutlass.Int32,
        cuda_stream: object,
    ) -> None:
        device(
            codes, scales, weight, weight_scales, down_scales, expert_ids, route_offsets, routes, rows, first_expert
        ).launch(
            grid=(ctas, 1, 1),
            block=(shape.threads, 1, 1),
            stream=cuda_stream,
            min_blocks_per_mp=max(1, 512 // shape.threads),
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    return host
