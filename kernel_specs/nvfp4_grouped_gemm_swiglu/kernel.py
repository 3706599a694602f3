"""CuTe DSL kernel for `nvfp4_grouped_gemm_swiglu`: streams of gate and up tiles, a warp per range of K.

The warps' sums of 16 outputs meet in shared memory, where the next outputs' sums have places of their own, so that half
of the warps finish while the others go on. The 16 outputs of a route are one scale block.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.nvfp4 import TILE_SUMS, TokenOperands, leave
from kernel_specs.primitives.nvfp4_finish import BUFFERS, make_quantize, turned
from kernel_specs.primitives.nvfp4_stream import make_stream
from kernel_specs.primitives.nvfp4_tiling import LANES, StreamShape

PARTS = 2  # gate and up


def nvfp4_grouped_gemm_swiglu(
    moe_hidden_size: int,
    packed_hidden: int,
    hidden_blocks: int,
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
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    shape = StreamShape(groups, ranges, PARTS, width_blocks, row_warps, stages, ctas)
    team = ranges * LANES  # threads of a stream
    assert ranges * groups * 64 == moe_hidden_size == packed_hidden * 2 == hidden_blocks * 16
    assert expert_code_bytes == width_blocks * PARTS * ranges * shape.code_bytes
    assert expert_scale_bytes == width_blocks * PARTS * ranges * shape.scale_bytes

    def load_tokens(
        context: tuple, start: cutlass.Int32, last: cutlass.Int32, k_range: cutlass.Int32, lane: cutlass.Int32
    ) -> TokenOperands:
        """The lane's blocks of its token; surplus ones repeat the last route, and are not stored."""
        _, codes, scales, _, _, routes, _, _ = context
        token = routes[cutlass.min(start + lane // 4, last - 1)] // num_experts_per_tok
        block = (k_range * 4 + lane % 4) * groups
        code = cute.assume(token * packed_hidden + block * 8, 16)
        scale = cute.assume(token * hidden_blocks + block, groups)
        return TokenOperands(codes.iterator + code, scales.iterator + scale, groups)

    quantize = make_quantize(ranges)

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
        """Put the sums where those of all ranges meet; with those of the last part, all meet."""
        thread, _, _ = cute.arch.thread_idx()
        row = cutlass.Int32(0) if row_warps == 1 else thread // team
        buffer = (job % BUFFERS * row_warps + row) * (ranges * PARTS * TILE_SUMS)
        start_of_sums = context[0] + cute.assume(buffer, TILE_SUMS)
        leave(sums, 0, start_of_sums + cute.assume((k_range * PARTS + part) * TILE_SUMS, TILE_SUMS), lane)
        if part == PARTS - 1:
            if ranges == 1:
                cute.arch.sync_warp()
            else:
                cute.arch.barrier(barrier_id=row + 1, number_of_threads=team)
            met = cute.make_tensor(start_of_sums, cute.make_layout(ranges * PARTS * TILE_SUMS))
            _, _, _, gate_up_scales, global_scale, routes, out_codes, out_scales = context
            quantize(
                met, gate_up_scales, global_scale, routes, out_codes, out_scales,
                expert, start, last, tile, turned(thread, team, job),
            )  # fmt: skip

    run = make_stream(shape, expert_code_bytes, expert_scale_bytes, load_tokens, deliver)

    @cute.kernel
    def device(
        codes: cute.Tensor,
        scales: cute.Tensor,
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        gate_up_scales: cute.Tensor,
        global_scale: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        out_codes: cute.Tensor,
        out_scales: cute.Tensor,
        first_expert: cutlass.Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(thread // LANES), thread % LANES
        allocator = cutlass.memory.SmemAllocator()
        ring = allocator.allocate(shape.warps * shape.ring_bytes, 128)
        sums = allocator.allocate_array(cutlass.Float32, BUFFERS * shape.warps * PARTS * TILE_SUMS)
        full = allocator.allocate_array(cutlass.Int64, shape.warps * stages)
        num_routes = cute.size(routes)
        context = (
            sums,
            codes,
            scales,
            gate_up_scales,
            global_scale,
            cute.make_tensor(routes.iterator, cute.make_layout(num_routes)),
            cute.make_tensor(out_codes.iterator, cute.make_layout((packed_width, num_routes))),
            cute.make_tensor(out_scales.iterator, cute.make_layout((width_blocks, num_routes))),
        )
        run(
            context, weight, weight_scales, expert_ids, route_offsets, first_expert,
            ring + cute.assume(warp * shape.ring_bytes, 64),
            full + warp * stages, block * row_warps + warp // ranges, warp % ranges, lane,
        )  # fmt: skip

    @cute.jit
    def host(
        codes: cute.Tensor,
        scales: cute.Tensor,
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        gate_up_scales: cute.Tensor,
        global_scale: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        out_codes: cute.Tensor,
        out_scales: cute.Tensor,
        first_expert: cutlass.Int32,
        cuda_stream: object,
    ) -> None:
        device(
            codes, scales, weight, weight_scales, gate_up_scales, global_scale, expert_ids, route_offsets, routes,
            out_codes, out_scales, first_expert,
        ).launch(
            grid=(ctas, 1, 1),
            block=(shape.threads, 1, 1),
            stream=cuda_stream,
            min_blocks_per_mp=max(1, 512 // shape.threads),
            preferred_smem_carveout=100,
            use_pdl=True,
        )  # fmt: skip

    return host
