"""The end of a tile of the BF16 grouped GEMMs: the warps' sums meet in shared memory and go to their routes.

An item is one lane's four sums of a row block (16 weight rows) and a token tile (8 rows of the expert).
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives import mma
from kernel_specs.primitives.grouped_tiling import ITEM_BYTES, LANES, ROWS, TILE_ROWS, TOKENS, GroupedTiling

ITEM = ITEM_BYTES // 4
CHAINS = 2  # accumulators of an item: the MMAs of two k16 steps need not wait for each other


def make_finish(tile: GroupedTiling) -> tuple[Callable[..., None], Callable[..., None]]:
    """`leave`, with which each warp puts down its sums, and `store`, which adds them up; all must have left theirs."""
    parts, token_tiles, part_rows, consumers = tile.parts, tile.token_tiles, tile.part_rows, tile.blocks
    row_blocks = TILE_ROWS // ROWS
    sums_of_chain = row_blocks * token_tiles * ITEM
    part_items = tile.items // parts

    def leave(sums: cute.Tensor, partials: cute.Pointer, warp: cutlass.Int32, lane: cutlass.Int32) -> None:
        """Put the warp's sums where those of all warps meet."""
        for number in range(row_blocks * token_tiles):
            values = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
            for i in range(ITEM):
                values[i] = sums[number * ITEM + i] + sums[sums_of_chain + number * ITEM + i]
            target = partials + cute.assume((warp * tile.items + number * LANES + lane) * ITEM, ITEM)
            cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(ITEM)))

    def add_warps(partials: cute.Pointer, item: cutlass.Int32) -> cute.Tensor:
        total = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
        total.fill(0.0)
        for source in range(consumers):
            start = partials + cute.assume((source * tile.items + item) * ITEM, ITEM)
            values = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(ITEM)), values)
            total.store(total.load() + values.load())
        return total

    @cute.jit
    def store(
        partials: cute.Pointer,
        out: cute.Tensor,
        routes: cute.Tensor,
        first_route: cutlass.Int32,
        rows: cutlass.Int32,
        row_tile: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """Add up, round and write the outputs of a tile and a pass: rows r and r + 8 of tokens t and t + 4."""
        for item in cutlass.range(thread, part_items, consumers * LANES, unroll=1):
            totals = [add_warps(partials, part * part_items + item) for part in range(parts)]
            lane = item % LANES
            row = item // (token_tiles * LANES) * ROWS + mma.fragment_row(lane)
            token = item // LANES % token_tiles * TOKENS + lane % 4
            for i in cutlass.range_constexpr(ITEM):
                at = token + i % 2 * 4
                if at < rows:
                    value = totals[0][i]
                    if cutlass.const_expr(parts == 2):
                        value = value / (1.0 + cute.math.exp(-value)) * totals[1][i]
                    feature = row_tile * part_rows + row + i // 2 * 8
                    out[routes[first_route + at], feature] = value.to(out.element_type)

    return leave, store
