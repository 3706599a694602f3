"""CuTe DSL kernel for `nvfp4_grouped_gemm_swiglu`: a CTA per active expert and 16 outputs, a warp per range of K.

A warp asks for all of its weights at once, into registers, before it waits for the previous launch; 8 routes at a time
are then multiplied with them. The warps' sums meet in shared memory; the 16 outputs of a route are one scale block.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.nvfp4 import (
    ITEM,
    TILE_SUMS,
    TokenOperands,
    WarpWeights,
    add_ranges,
    leave,
    multiply_range,
    place,
)
from kernel_specs.primitives.nvfp4_codes import SIXTH, code_e2m1, reciprocal, round_e4m3
from kernel_specs.primitives.nvfp4_tiling import LANES, TILE_ROWS, TOKENS
from kernel_specs.primitives.warp_topk import sigmoid

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
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    threads = ranges * LANES
    range_codes = groups * LANES * 16  # bytes of a range of a tile
    range_scales = groups * LANES * 2
    assert ranges * groups * 64 == moe_hidden_size == packed_hidden * 2 == hidden_blocks * 16
    assert expert_code_bytes == width_blocks * PARTS * ranges * range_codes
    assert expert_scale_bytes == width_blocks * PARTS * ranges * range_scales

    def load_tiles(
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        expert: cutlass.Int32,
        row_tile: cutlass.Int32,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> list[WarpWeights]:
        tiles = []
        for part in range(PARTS):
            number = cutlass.Int64((row_tile * PARTS + part) * ranges + warp)
            code = cutlass.Int64(expert) * expert_code_bytes + number * range_codes + lane * 16
            scale = cutlass.Int64(expert) * expert_scale_bytes + number * range_scales + lane * (2 * groups)
            lane_codes = weight.iterator + cute.assume(code, 16)
            lane_scales = weight_scales.iterator + cute.assume(scale, 2 * groups)
            tiles.append(WarpWeights(lane_codes, lane_scales, groups))
        return tiles

    def load_token(
        codes: cute.Tensor, scales: cute.Tensor, token: cutlass.Int32, warp: cutlass.Int32, lane: cutlass.Int32
    ) -> TokenOperands:
        """The lane's blocks of its token."""
        block = (warp * 4 + lane % 4) * groups
        code = cute.assume(token * packed_hidden + block * 8, 16)
        scale = cute.assume(token * hidden_blocks + block, groups)
        return TokenOperands(codes.iterator + code, scales.iterator + scale, groups)

    @cute.jit
    def finish(
        slots: cute.Tensor,
        gate_scale: cutlass.Float32,
        up_scale: cutlass.Float32,
        scale: cutlass.Float32,
        routes: cute.Tensor,
        out_codes: cute.Tensor,
        out_scales: cute.Tensor,
        first: cutlass.Int32,
        last: cutlass.Int32,
        row_tile: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """16 neighbouring lanes have the 16 outputs of a route."""
        inverse_scale = reciprocal(scale)
        for step in cutlass.range_constexpr(-(-TILE_ROWS * TOKENS // threads)):
            element = thread + step * threads
            if element < TILE_ROWS * TOKENS:  # whole warps
                row, token = element % TILE_ROWS, element // TILE_ROWS
                at = place(row, token)
                gate = add_ranges(slots, at, ranges, PARTS * TILE_SUMS) * gate_scale
                up = add_ranges(slots, at + TILE_SUMS, ranges, PARTS * TILE_SUMS) * up_scale
                value = gate * sigmoid(gate) * up
                largest = cute.arch.fmax(value, -value)
                for offset in cutlass.range_constexpr(4):
                    largest = cute.arch.fmax(largest, cute.arch.shuffle_sync_bfly(largest, 1 << offset))
                byte, block_scale = round_e4m3(scale * (largest * SIXTH))
                factor = cutlass.select_(
                    block_scale == 0.0, cutlass.Float32(0.0), reciprocal(block_scale * inverse_scale)
                )
                word = code_e2m1(value * factor) << (row % 8 * 4)
                for offset in cutlass.range_constexpr(3):
                    word = word | cute.arch.shuffle_sync_bfly(word, 1 << offset)
                position = first + token
                if position < last:
                    route = routes[position]
                    if row % 8 == 0:
                        cute.recast_tensor(out_codes[None, route], cutlass.Int32)[row_tile * 2 + row // 8] = word
                    if row == 0:
                        out_scales[row_tile, route] = cutlass.Uint8(byte)

    @cute.jit
    def work(
        slots: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        gate_up_scales: cute.Tensor,
        global_scale: cute.Tensor,
        routes: cute.Tensor,
        out_codes: cute.Tensor,
        out_scales: cute.Tensor,
        expert: cutlass.Int32,
        first: cutlass.Int32,
        last: cutlass.Int32,
        row_tile: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        warp, lane = cute.arch.make_warp_uniform(thread // LANES), thread % LANES
        gate_scale, up_scale = gate_up_scales[expert, 0], gate_up_scales[expert, 1]
        scale = global_scale[0]
        for start in cutlass.range(first, last, TOKENS, unroll=1):
            # More than 8 routes are rare, and find the weights in L2. To hold them unpacked would take too many
            # registers, so the compiler must not know that they are the same again: start >> 31 is always 0.
            tiles = load_tiles(weight, weight_scales, expert + (start >> 31), row_tile, warp, lane)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            # surplus rows of the last MMA repeat the last route, and are not stored
            route = routes[cutlass.min(start + lane // 4, last - 1)]
            tokens = load_token(codes, scales, route // num_experts_per_tok, warp, lane)
            sums = cute.make_rmem_tensor((PARTS * ITEM,), cutlass.Float32)
            sums.fill(0.0)
            multiply_range(sums, tiles, tokens, groups)
            for part in cutlass.range_constexpr(PARTS):
                leave(sums, part, slots.iterator + cute.assume((warp * PARTS + part) * TILE_SUMS, TILE_SUMS), lane)
            cute.arch.sync_threads()
            finish(slots, gate_scale, up_scale, scale, routes, out_codes, out_scales, start, last, row_tile, thread)
            cute.arch.sync_threads()

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
        row_tile, index, _ = cute.arch.block_idx()
        shared = cute.arch.alloc_smem(cutlass.Float32, ranges * PARTS * TILE_SUMS, alignment=128)
        slots = cute.make_tensor(shared, cute.make_layout(ranges * PARTS * TILE_SUMS))
        num_routes = cute.size(routes)
        flat_routes = cute.make_tensor(routes.iterator, cute.make_layout(num_routes))
        out_codes = cute.make_tensor(out_codes.iterator, cute.make_layout((packed_width, num_routes)))
        out_scales = cute.make_tensor(out_scales.iterator, cute.make_layout((width_blocks, num_routes)))
        first, last = route_offsets[index], route_offsets[index + 1]
        expert = expert_ids[index] - first_expert
        if last > first and expert >= 0 and expert < weight.shape[0]:
            work(
                slots, codes, scales, weight, weight_scales, gate_up_scales, global_scale, flat_routes, out_codes,
                out_scales, expert, first, last, row_tile, thread,
            )  # fmt: skip
        else:
            # whoever follows may rely on what precedes this launch
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()

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
        most = cutlass.min(expert_ids.shape[0], codes.shape[0] * num_experts_per_tok)
        device(
            codes, scales, weight, weight_scales, gate_up_scales, global_scale, expert_ids, route_offsets, routes,
            out_codes, out_scales, first_expert,
        ).launch(
            grid=(width_blocks, most, 1),
            block=(threads, 1, 1),
            stream=cuda_stream,
            min_blocks_per_mp=max(1, 512 // threads),
            preferred_smem_carveout=25,
            use_pdl=True,
        )  # fmt: skip

    return host
