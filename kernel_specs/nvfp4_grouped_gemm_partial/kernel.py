"""CuTe DSL kernel for `nvfp4_grouped_gemm_partial`: streams of row tiles, a warp per range of K.

Where one warp has all of K, as at TP 8, it stores its sums from registers. Otherwise the ranges' sums meet in shared
memory, where the next tile's sums have places of their own.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.nvfp4 import ITEM, TILE_SUMS, TokenOperands, leave
from kernel_specs.primitives.nvfp4_finish import BUFFERS, make_store, store_own, turned
from kernel_specs.primitives.nvfp4_stream import make_stream
from kernel_specs.primitives.nvfp4_tiling import LANES, TILE_ROWS, StreamShape


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
    assert rows_dtype in ("float32", "bfloat16")

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

    store = make_store(ranges)

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
        _, _, _, down_scales, routes, rows = context
        if ranges == 1:
            store_own(sums, down_scales, routes, rows, expert, start, last, tile, lane)
            return
        thread, _, _ = cute.arch.thread_idx()
        row = cutlass.Int32(0) if row_warps == 1 else thread // team
        buffer = (job % BUFFERS * row_warps + row) * (ranges * TILE_SUMS)
        start_of_sums = context[0] + cute.assume(buffer, TILE_SUMS)
        leave(sums, 0, start_of_sums + cute.assume(k_range * TILE_SUMS, TILE_SUMS), lane)
        cute.arch.barrier(barrier_id=row + 1, number_of_threads=team)
        met = cute.make_tensor(start_of_sums, cute.make_layout(ranges * TILE_SUMS))
        store(met, down_scales, routes, rows, expert, start, last, tile, turned(thread, team, job))

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
