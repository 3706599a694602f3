"""What becomes of the sums of 16 rows and 8 routes: SwiGLU and NVFP4 behind the first GEMM, rows behind the second.

Sums of several ranges of K lie in shared memory, one slot for each (`nvfp4.leave`). The 16 outputs of a route are one
scale block.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.nvfp4 import TILE_SUMS, UNSCALE, add_ranges, place
from kernel_specs.primitives.nvfp4_codes import SIXTH, code_e2m1, reciprocal, round_e4m3
from kernel_specs.primitives.nvfp4_tiling import LANES, TILE_ROWS, TOKENS
from kernel_specs.primitives.warp_topk import sigmoid

OUTPUTS = TILE_ROWS * TOKENS  # of a tile
BUFFERS = 2  # the next tile's sums have places of their own, so that half of the warps finish while the others go on


def turned(thread: cutlass.Int32, team: int, job: cutlass.Int32) -> cutlass.Int32:
    """A thread's number in its team, turned so that halves of a large team finish tiles in turn."""
    return (thread % team + job % BUFFERS * OUTPUTS) % team if team > OUTPUTS else thread % team


def make_quantize(ranges: int) -> Callable[..., None]:
    """What a stream's `ranges` warps do with the sums of a gate and an up tile."""
    team = ranges * LANES

    @cute.jit
    def quantize(
        sums: cute.Tensor,
        gate_up_scales: cute.Tensor,
        global_scale: cute.Tensor,
        routes: cute.Tensor,
        out_codes: cute.Tensor,
        out_scales: cute.Tensor,
        expert: cutlass.Int32,
        first: cutlass.Int32,
        last: cutlass.Int32,
        tile: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """16 neighbouring lanes have the 16 outputs of a route."""
        scale = global_scale[0]
        inverse_scale = reciprocal(scale)
        gate_scale, up_scale = gate_up_scales[expert, 0], gate_up_scales[expert, 1]
        for step in cutlass.range_constexpr(-(-OUTPUTS // team)):
            element = thread + step * team
            if element < OUTPUTS:  # whole warps
                row, token = element % TILE_ROWS, element // TILE_ROWS
                at = place(row, token)
                gate = add_ranges(sums, at, ranges, 2 * TILE_SUMS) * gate_scale
                up = add_ranges(sums, at + TILE_SUMS, ranges, 2 * TILE_SUMS) * up_scale
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
                        cute.recast_tensor(out_codes[None, route], cutlass.Int32)[tile * 2 + row // 8] = word
                    if row == 0:
                        out_scales[tile, route] = cutlass.Uint8(byte)

    return quantize


@cute.jit
def store_own(
    sums: cute.Tensor,
    down_scales: cute.Tensor,
    routes: cute.Tensor,
    rows: cute.Tensor,
    expert: cutlass.Int32,
    start: cutlass.Int32,
    last: cutlass.Int32,
    tile: cutlass.Int32,
    lane: cutlass.Int32,
) -> None:
    """Rows lane / 4 and 8 more of two tokens: the lane has their whole sums."""
    scale = down_scales[expert]
    column = tile * TILE_ROWS + lane // 4
    for i in cutlass.range_constexpr(2):
        position = start + lane % 4 * 2 + i
        if position < last:
            route = routes[position]
            for half in cutlass.range_constexpr(2):
                # + 0.0: a sum of zeros is +0
                value = (sums[half * 2 + i] + 0.0) * UNSCALE * scale
                rows[column + half * 8, route] = value.to(rows.element_type)


def make_store(ranges: int) -> Callable[..., None]:
    """What a stream's `ranges` warps do with the sums of a tile of the second GEMM."""
    team = ranges * LANES

    @cute.jit
    def store(
        sums: cute.Tensor,
        down_scales: cute.Tensor,
        routes: cute.Tensor,
        rows: cute.Tensor,
        expert: cutlass.Int32,
        start: cutlass.Int32,
        last: cutlass.Int32,
        tile: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """Neighbouring threads store neighbouring columns."""
        scale = down_scales[expert]
        for step in cutlass.range_constexpr(-(-OUTPUTS // team)):
            element_number = thread + step * team
            row, token = element_number % TILE_ROWS, element_number // TILE_ROWS
            if element_number < OUTPUTS and start + token < last:
                value = add_ranges(sums, place(row, token), ranges, TILE_SUMS) * scale
                rows[tile * TILE_ROWS + row, routes[start + token]] = value.to(rows.element_type)

    return store
