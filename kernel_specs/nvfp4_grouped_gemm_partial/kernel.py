"""CuTe DSL kernel for `nvfp4_grouped_gemm_partial`: a CTA per active expert and up to 256 columns of its rows.

A warp has a range of K of a few row tiles, and asks for all of their weights at once, into registers, before it waits
for the first GEMM; 8 routes at a time are then multiplied with them. The ranges' sums meet in shared memory, from
where neighbouring threads store neighbouring columns.
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
from kernel_specs.primitives.nvfp4_tiling import LANES, TILE_ROWS, TOKENS

RESIDENT = 512  # threads of an SM that registers are to suffice for


def nvfp4_grouped_gemm_partial(
    moe_hidden_size: int,
    packed_width: int,
    width_blocks: int,
    expert_code_bytes: int,
    expert_scale_bytes: int,
    num_experts_per_tok: int,
    groups: int,
    ranges: int,
    warp_tiles: int,
    row_warps: int,
    rows_dtype: str,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    threads = ranges * row_warps * LANES
    cta_tiles = row_warps * warp_tiles
    cta_columns = cta_tiles * TILE_ROWS
    range_codes = groups * LANES * 16  # bytes of a range of a tile
    range_scales = groups * LANES * 2
    assert ranges * groups * 64 == packed_width * 2 == width_blocks * 16
    assert moe_hidden_size % cta_columns == 0
    assert expert_code_bytes == moe_hidden_size // TILE_ROWS * ranges * range_codes
    assert expert_scale_bytes == moe_hidden_size // TILE_ROWS * ranges * range_scales
    element = {"float32": cutlass.Float32, "bfloat16": cutlass.BFloat16}[rows_dtype]

    def load_tiles(
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        expert: cutlass.Int32,
        first_tile: cutlass.Int32,
        part: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> list[WarpWeights]:
        """The lane's part of range `part` of the warp's tiles."""
        tiles = []
        for i in range(warp_tiles):
            number = cutlass.Int64((first_tile + i) * ranges + part)
            code = cutlass.Int64(expert) * expert_code_bytes + number * range_codes + lane * 16
            scale = cutlass.Int64(expert) * expert_scale_bytes + number * range_scales + lane * (2 * groups)
            lane_codes = weight.iterator + cute.assume(code, 16)
            lane_scales = weight_scales.iterator + cute.assume(scale, 2 * groups)
            tiles.append(WarpWeights(lane_codes, lane_scales, groups))
        return tiles

    def load_token(
        codes: cute.Tensor, scales: cute.Tensor, route: cutlass.Int32, part: cutlass.Int32, lane: cutlass.Int32
    ) -> TokenOperands:
        """The lane's blocks of its route's row."""
        block = (part * 4 + lane % 4) * groups
        code = cute.assume(route * packed_width + block * 8, 16)
        scale = cute.assume(route * width_blocks + block, groups)
        return TokenOperands(codes.iterator + code, scales.iterator + scale, groups)

    @cute.jit
    def finish(
        slots: cute.Tensor,
        scale: cutlass.Float32,
        routes: cute.Tensor,
        rows: cute.Tensor,
        first: cutlass.Int32,
        last: cutlass.Int32,
        first_column: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        count = cutlass.min(last - first, TOKENS) * cta_columns
        for element_number in cutlass.range(thread, count, threads, unroll=1):
            column, token = element_number % cta_columns, element_number // cta_columns
            at = column // TILE_ROWS * TILE_SUMS + place(column % TILE_ROWS, token)
            value = add_ranges(slots, at, ranges, cta_tiles * TILE_SUMS) * scale
            rows[first_column + column, routes[first + token]] = value.to(element)

    @cute.jit
    def work(
        slots: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        down_scales: cute.Tensor,
        routes: cute.Tensor,
        rows: cute.Tensor,
        expert: cutlass.Int32,
        first: cutlass.Int32,
        last: cutlass.Int32,
        row_part: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        warp, lane = cute.arch.make_warp_uniform(thread // LANES), thread % LANES
        part, row_warp = warp % ranges, warp // ranges
        first_tile = row_part * cta_tiles + row_warp * warp_tiles
        scale = down_scales[expert]
        for start in cutlass.range(first, last, TOKENS, unroll=1):
            # As in the first GEMM: read again from L2 for more than 8 routes; start >> 31 is always 0.
            tiles = load_tiles(weight, weight_scales, expert + (start >> 31), first_tile, part, lane)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            # surplus rows of the last MMA repeat the last route, and are not stored
            route = routes[cutlass.min(start + lane // 4, last - 1)]
            tokens = load_token(codes, scales, route, part, lane)
            sums = cute.make_rmem_tensor((warp_tiles * ITEM,), cutlass.Float32)
            sums.fill(0.0)
            multiply_range(sums, tiles, tokens, groups)
            for tile in cutlass.range_constexpr(warp_tiles):
                slot = (part * cta_tiles + row_warp * warp_tiles + tile) * TILE_SUMS
                leave(sums, tile, slots.iterator + cute.assume(slot, TILE_SUMS), lane)
            cute.arch.sync_threads()
            finish(slots, scale, routes, rows, start, last, row_part * cta_columns, thread)
            cute.arch.sync_threads()

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
        row_part, index, _ = cute.arch.block_idx()
        shared = cute.arch.alloc_smem(cutlass.Float32, ranges * cta_tiles * TILE_SUMS, alignment=128)
        slots = cute.make_tensor(shared, cute.make_layout(ranges * cta_tiles * TILE_SUMS))
        num_routes = cute.size(routes)
        flat_routes = cute.make_tensor(routes.iterator, cute.make_layout(num_routes))
        flat_rows = cute.make_tensor(rows.iterator, cute.make_layout((moe_hidden_size, num_routes)))
        first, last = route_offsets[index], route_offsets[index + 1]
        expert = expert_ids[index] - first_expert
        if last > first and expert >= 0 and expert < weight.shape[0]:
            work(
                slots, codes, scales, weight, weight_scales, down_scales, flat_routes, flat_rows, expert, first, last,
                row_part, thread,
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
        down_scales: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        rows: cute.Tensor,
        first_expert: cutlass.Int32,
        cuda_stream: object,
    ) -> None:
        most = cutlass.min(expert_ids.shape[0], codes.shape[0] * num_experts_per_tok)
        device(
            codes, scales, weight, weight_scales, down_scales, expert_ids, route_offsets, routes, rows, first_expert
        ).launch(
            grid=(moe_hidden_size // cta_columns, most, 1),
            block=(threads, 1, 1),
            stream=cuda_stream,
            min_blocks_per_mp=max(1, RESIDENT // threads),
            preferred_smem_carveout=25,
            use_pdl=True,
        )

    return host
