"""CuTe DSL kernel for `router_pooler_gemm`: some clusters have the router's rows, the others the pooler's.

A CTA has 16 experts or `pooler_rows` rows of the pooler, and a part of K. Its warps ask for all of its weights with
bulk copies, and each multiplies 32 columns of every slab: weights are the 16-row operand of the MMA, 8 tokens the
other. FP32 weights are split into three BF16 parts in registers. A lane owns 8 neighbouring columns, which it uses for
two k16 steps; both operands see the columns in that order. The warps' sums meet in shared memory, the CTAs' in the
shared memory of the cluster.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import cute

from kernel_specs.primitives.bf16_parts import PARTS, Words, load_words, split_pair
from kernel_specs.primitives.bulk import bulk_copy
from kernel_specs.primitives.fragments import multiply
from kernel_specs.router_pooler_gemm.cut import (
    BLOCK,
    CTAS,
    ITEM,
    LANE_COLUMNS,
    ROWS,
    SLAB,
    THREADS,
    TOKENS,
    WARP,
    WARPS,
    Cut,
    Share,
)

Body = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Shared:
    """A CTA's shared memory. `partials`, where the sums of its warps meet, may lie over the weights."""

    ring: cute.Pointer
    partials: cute.Pointer
    received: cute.Pointer
    full: cute.Pointer
    arrived: cute.Pointer


def router_pooler_gemm(
    num_experts: int,
    hidden_size: int,
    pooled_width: int,
    max_tokens: int,
    split: int,
    pooler_rows: int,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    cut = Cut(num_experts, hidden_size, pooled_width, max_tokens, split, pooler_rows)
    columns, slabs, tiles = cut.columns, cut.slabs, cut.tiles

    def load_tokens(activation: cute.Tensor, column: cutlass.Int32, lane: cutlass.Int32) -> list[Words]:
        """The lane's columns of token lane // 4 of each tile; past the last token it reads that one again."""
        loaded = []
        for tile in range(tiles):
            token = cutlass.min(tile * TOKENS + lane // 4, activation.shape[0] - 1)
            start = token * hidden_size + column + lane % 4 * LANE_COLUMNS
            loaded.append(load_words(activation.iterator + cute.assume(start, LANE_COLUMNS)))
        return loaded

    def multiply_router(
        share: Share, sums: cute.Tensor, ring: cute.Pointer, at: cutlass.Int32, tokens: list[Words]
    ) -> None:
        """Two k16 steps of 16 FP32 rows, whose parts have sums of their own."""
        for step in range(2):
            low = load_words(ring + cute.assume(at + step * 4, 4))
            high = load_words(ring + cute.assume(at + step * 4 + 8 * share.stride, 4))
            pairs = [split_pair(*pair) for pair in (low[:2], high[:2], low[2:], high[2:])]
            for part in reversed(range(PARTS)):
                rows = tuple(pair[part] for pair in pairs)
                for tile in range(tiles):
                    first = (part * tiles + tile) * ITEM
                    multiply(sums, first, rows, tokens[tile][2 * step], tokens[tile][2 * step + 1])

    def multiply_pooler(
        share: Share, sums: cute.Tensor, ring: cute.Pointer, at: cutlass.Int32, tokens: list[Words]
    ) -> None:
        """Two k16 steps of all row blocks."""
        for block in range(share.blocks):
            low = load_words(ring + cute.assume(at + block * ROWS * share.stride, LANE_COLUMNS))
            high = load_words(ring + cute.assume(at + (block * ROWS + 8) * share.stride, LANE_COLUMNS))
            for step in range(2):
                rows = (low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1])
                for tile in range(tiles):
                    first = ((block * share.chains + step) * tiles + tile) * ITEM
                    multiply(sums, first, rows, tokens[tile][2 * step], tokens[tile][2 * step + 1])

    def add_chains(share: Share, sums: cute.Tensor, block: int, tile: int) -> cute.Tensor:
        total = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
        first = block * share.chains
        for i in range(ITEM):
            value = sums[((first + share.chains - 1) * tiles + tile) * ITEM + i]
            for chain in reversed(range(share.chains - 1)):
                value = sums[((first + chain) * tiles + tile) * ITEM + i] + value
            total[i] = value
        return total

    def add_sources(partials: cute.Pointer, item: cutlass.Int32, sources: int, stride: int) -> cute.Tensor:
        """The sum of an item over its sources, which are `stride` items apart, in order."""
        total = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
        total.fill(0.0)
        for source in range(sources):
            values = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
            start = partials + cute.assume((source * stride + item) * ITEM, ITEM)
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(ITEM)), values)
            total.store(total.load() + values.load())
        return total

    @cute.jit
    def store(total: cute.Tensor, out: cute.Tensor, first_row: cutlass.Int32, item: cutlass.Int32) -> None:
        """Rows r and r + 8 of two neighbouring tokens, as far as there are such."""
        row = first_row + item // (tiles * WARP) * ROWS + item % WARP // 4
        token = item // WARP % tiles * TOKENS + item % 4 * 2
        for i in cutlass.range_constexpr(ITEM):
            at, feature = token + i % 2, row + i // 2 * 8
            if at < out.shape[0] and feature < out.shape[1]:
                out[at, feature] = total[i].to(out.element_type)

    def make_body(share: Share, multiply_rows: Callable[..., None]) -> Body:
        """What a CTA with such a share does: (activation, weight, out, shared, row tile, rank in the cluster)."""
        rows, stride, items, owned = share.rows, share.stride, share.items, share.owned

        @cute.jit
        def open_barriers(shared: Shared, present: cutlass.Int32, thread: cutlass.Int32) -> None:
            """One for the weights, of which `present` rows come, and one for the sums of the cluster."""
            if thread == 0:
                cute.arch.mbarrier_init(shared.full, 1)
                cute.arch.mbarrier_init(shared.arrived, 1)
                cute.arch.mbarrier_init_fence()
                cute.arch.mbarrier_arrive_and_expect_tx(shared.full, present * share.row_bytes)
                cute.arch.mbarrier_arrive_and_expect_tx(shared.arrived, share.received_bytes)

        @cute.jit
        def request(
            weight: cute.Tensor,
            ring: cute.Pointer,
            full: cute.Pointer,
            first_row: cutlass.Int32,
            rank: cutlass.Int32,
            warp: cutlass.Int32,
        ) -> None:
            """Every warp asks for its rows, each in one copy; rows past the last one are left as they are."""
            for i in cutlass.range_constexpr(rows // WARPS):
                row = warp * (rows // WARPS) + i
                if first_row + row < weight.shape[0]:
                    start = cute.assume((first_row + row) * hidden_size + rank * columns, SLAB)
                    with cute.arch.elect_one():
                        bulk_copy(ring + row * stride, weight.iterator + start, share.row_bytes, full)

        @cute.jit
        def reduce(
            shared: Shared, out: cute.Tensor, first_row: cutlass.Int32, rank: cutlass.Int32, thread: cutlass.Int32
        ) -> None:
            """Over the warps, then over the cluster, whose CTAs own a part of the items each.

            A CTA ends after its owners' wait, hence not before everything that is sent to it has come.
            """
            for item in cutlass.range(thread, items, THREADS, unroll=1):
                total = add_sources(shared.partials, item, WARPS, items)
                words = tuple(total[i].bitcast(cutlass.Int32) for i in range(ITEM))
                target = shared.received + cute.assume((rank * owned + item % owned) * ITEM, ITEM)
                cute.arch.store_async_dsmem(target, words, shared.arrived, item // owned)
            for own in cutlass.range(thread, owned, THREADS, unroll=1):
                cute.arch.mbarrier_wait(shared.arrived, 0)
                store(add_sources(shared.received, own, split, owned), out, first_row, rank * owned + own)

        def body(
            activation: cute.Tensor,
            weight: cute.Tensor,
            out: cute.Tensor,
            shared: Shared,
            row_tile: cutlass.Int32,
            rank: cutlass.Int32,
        ) -> None:
            thread, _, _ = cute.arch.thread_idx()
            warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
            first_row = row_tile * rows
            ring = cute.recast_ptr(shared.ring, dtype=weight.element_type)
            open_barriers(shared, cutlass.min(rows, weight.shape[0] - first_row), thread)
            cute.arch.cluster_arrive_relaxed()
            cute.arch.sync_threads()
            # The weight does not depend on the previous launch: all of it is asked for before the wait.
            request(weight, ring, shared.full, first_row, rank, warp)
            cute.arch.cluster_wait()
            # the next launch may take what room is left and load its own weights
            cute.arch.griddepcontrol_launch_dependents()
            cute.arch.griddepcontrol_wait()

            column = rank * columns + warp * BLOCK
            tokens = [load_tokens(activation, column + i * SLAB, lane) for i in range(slabs)]
            sums = cute.make_rmem_tensor((share.blocks * share.chains * tiles * ITEM,), cutlass.Float32)
            sums.fill(0.0)
            cute.arch.mbarrier_wait(shared.full, 0)
            at = lane // 4 * stride + warp * BLOCK + lane % 4 * LANE_COLUMNS
            for i in range(slabs):
                multiply_rows(share, sums, ring, at + i * SLAB, tokens[i])
            if cut.reuse:
                cute.arch.sync_threads()
            for block in range(share.blocks):
                for tile in range(tiles):
                    item = warp * items + (block * tiles + tile) * WARP + lane
                    target = cute.make_tensor(shared.partials + cute.assume(item * ITEM, ITEM), cute.make_layout(ITEM))
                    cute.autovec_copy(add_chains(share, sums, block, tile), target)
            cute.arch.sync_threads()
            reduce(shared, out, first_row, rank, thread)

        return body

    router_body = make_body(cut.router, multiply_router)
    pooler_body = make_body(cut.pooler, multiply_pooler)

    @cute.kernel
    def device(
        activation: cute.Tensor, router: cute.Tensor, pooler: cute.Tensor, logits: cute.Tensor, pooled: cute.Tensor
    ) -> None:
        grid_block, _, _ = cute.arch.block_idx()
        row_tile, rank = grid_block // split, grid_block % split
        ring = cute.arch.alloc_smem(cutlass.Float32, cut.ring_bytes // 4, alignment=128)
        received = cute.arch.alloc_smem(cutlass.Float32, cut.received_bytes // 4, alignment=128)
        partials = ring
        if cutlass.const_expr(not cut.reuse):
            partials = cute.arch.alloc_smem(cutlass.Float32, cut.partial_bytes // 4, alignment=128)
        full = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        arrived = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
        shared = Shared(ring, partials, received, full, arrived)
        if row_tile < cut.router_tiles:
            router_body(activation, router, logits, shared, row_tile, rank)
        else:
            pooler_body(activation, pooler, pooled, shared, row_tile - cut.router_tiles, rank)

    @cute.jit
    def host(
        activation: cute.Tensor,
        router: cute.Tensor,
        pooler: cute.Tensor,
        logits: cute.Tensor,
        pooled: cute.Tensor,
        cuda_stream: object,
    ) -> None:
        device(activation, router, pooler, logits, pooled).launch(
            grid=((cut.router_tiles + cut.pooler_tiles) * split, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(split, 1, 1),
            stream=cuda_stream,
            use_pdl=True,
            min_blocks_per_mp=CTAS,
            preferred_smem_carveout=100,
        )

    return host
