"""The end of a GEMM that splits K: partial sums of an output meet in one CTA, are added in a fixed order, and stored.

An item is one lane's four sums of a row block (16 weight rows) and a token tile (8 tokens). The CTAs of a cluster share
the items evenly; each receives, in slots of its own, those of every group of warps of the cluster.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives import mma
from kernel_specs.primitives.mma import LANES, ROWS, TOKENS

ITEM = 4


def make_finish(tile) -> Callable[..., None]:
    """`finish`, which every warp that multiplies calls with its sums.

    `tile` is the kernel's tiling. With two halves the sums of a gate and an up row make one output: silu(gate) * up.
    """
    halves, token_tiles, warp_blocks = tile.halves, tile.token_tiles, tile.warp_blocks
    owned, split, row_warps = tile.owned_items, tile.split, tile.row_warps

    def item_of(sums: cute.Tensor, part: int, i: int, t: int) -> cute.Tensor:
        """The lane's sums of row block `i` of its warp, in half `part`, with token tile `t`."""
        item = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
        for k in range(ITEM):
            item[k] = sums[((part * warp_blocks + i) * token_tiles + t) * ITEM + k]
        return item

    def exchange(
        sums: cute.Tensor,
        partials: cute.Pointer,
        arrived: cute.Pointer,
        rank: cutlass.Int32,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Send every item to the CTA that owns it, into the slot of its source; return when all of ours are here."""
        source = rank * tile.column_warps + warp // row_warps
        for part, i, t in [(p, i, t) for p in range(halves) for i in range(warp_blocks) for t in range(token_tiles)]:
            values = item_of(sums, part, i, t)
            item = (((warp % row_warps) * warp_blocks + i) * token_tiles + t) * LANES + lane
            target = partials + cute.assume(((source * halves + part) * owned + item % owned) * ITEM, ITEM)
            if split > 1:
                words = tuple(values[k].bitcast(cutlass.Int32) for k in range(ITEM))
                cute.arch.store_async_dsmem(target, words, arrived, item // owned)
            else:
                cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(ITEM)))
        if split > 1:
            cute.arch.mbarrier_wait(arrived, 0)
        else:
            cute.arch.barrier(barrier_id=1, number_of_threads=tile.consumers * LANES)

    def add_sources(partials: cute.Pointer, part: int, at: cutlass.Int32) -> cute.Tensor:
        total = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
        total.fill(0.0)
        for source in range(tile.sources):
            start = partials + cute.assume(((source * halves + part) * owned + at) * ITEM, ITEM)
            values = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(ITEM)), values)
            total.store(total.load() + values.load())
        return total

    @cute.jit
    def reduce_and_store(
        partials: cute.Pointer, out: cute.Tensor, row_tile: cutlass.Int32, rank: cutlass.Int32, thread: cutlass.Int32
    ) -> None:
        for at in cutlass.range(thread, owned, tile.consumers * LANES, unroll=1):
            totals = [add_sources(partials, part, at) for part in range(halves)]
            item = rank * owned + at
            block = item // (token_tiles * LANES)
            store(totals, out, row_tile, block, (item // LANES) % token_tiles, item % LANES)

    @cute.jit
    def store(
        totals: list[cute.Tensor],
        out: cute.Tensor,
        row_tile: cutlass.Int32,
        block: cutlass.Int32,
        token_tile: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Round and write one item: rows r and r + 8 of tokens t and t + 4, inside the tile and the tensor only."""
        row = block * ROWS + mma.fragment_row(lane)
        token = token_tile * TOKENS + lane % 4
        for k in cutlass.range_constexpr(ITEM):
            tile_row = row + (k // 2) * 8
            feature = row_tile * tile.half_rows + tile_row
            at = token + (k % 2) * 4
            if tile_row < tile.half_rows and feature < tile.out_features and at < out.shape[0]:
                value = totals[0][k]
                if cutlass.const_expr(halves == 2):
                    gate = totals[0][k].to(cutlass.BFloat16).to(cutlass.Float32)
                    up = totals[1][k].to(cutlass.BFloat16).to(cutlass.Float32)
                    value = gate / (1.0 + cute.math.exp(-gate)) * up
                out[at, feature] = value.to(cutlass.BFloat16)

    def finish(
        sums: cute.Tensor,
        partials: cute.Pointer,
        arrived: cute.Pointer,
        out: cute.Tensor,
        row_tile: cutlass.Int32,
        rank: cutlass.Int32,
        warp: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        lane = thread % LANES
        if tile.sources > 1:
            exchange(sums, partials, arrived, rank, warp, lane)
            reduce_and_store(partials, out, row_tile, rank, thread)
            return
        for i, t in [(i, t) for i in range(warp_blocks) for t in range(token_tiles)]:
            totals = [item_of(sums, part, i, t) for part in range(halves)]
            store(totals, out, row_tile, (warp % row_warps) * warp_blocks + i, t, lane)

    return finish
