"""CuTe DSL kernel for `router_pooler_gemm`: some clusters have the router's rows, the others the pooler's.

A CTA has 16 experts or `pooler_rows` rows of the pooler, and a part of K. Its warps ask for all of its weights with
bulk copies; `primitives/router_products.py` has what they do with them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
from cutlass import cute

from kernel_specs.primitives.bulk import bulk_copy
from kernel_specs.primitives.router_products import (
    leave,
    load_tokens,
    multiply_bfloat16,
    multiply_float32,
    send_item,
    store_item,
)
from kernel_specs.router_gemm.share import BLOCK, ITEM, LANE_COLUMNS, SLAB, THREADS, WARPS, Share
from kernel_specs.router_pooler_gemm.cut import CTAS, Cut

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
    columns = cut.columns

    def make_body(share: Share, multiply_rows: Callable[..., None]) -> Body:
        """What a CTA with such a share does: (activation, weight, out, shared, row tile, rank in the cluster)."""
        rows, stride, tiles = share.rows, share.stride, range(share.tiles)

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
        def finish(
            shared: Shared, out: cute.Tensor, first_row: cutlass.Int32, rank: cutlass.Int32, thread: cutlass.Int32
        ) -> None:
            """Add the sums up over the warps, then over the cluster, whose CTAs own a part of the items each."""
            for item in cutlass.range(thread, share.items, THREADS, unroll=1):
                send_item(share, shared.partials, shared.received, shared.arrived, item, rank)
            for own in cutlass.range(thread, share.owned, THREADS, unroll=1):
                store_item(share, shared.received, shared.arrived, out, first_row, own, rank)

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
            tokens = [load_tokens(activation, tiles, column + i * SLAB, lane) for i in range(share.slabs)]
            sums = cute.make_rmem_tensor((share.blocks * share.chains * share.tiles * ITEM,), cutlass.Float32)
            sums.fill(0.0)
            cute.arch.mbarrier_wait(shared.full, 0)
            at = lane // 4 * stride + warp * BLOCK + lane % 4 * LANE_COLUMNS
            for i in range(share.slabs):
                multiply_rows(share, sums, ring, at + i * SLAB, tokens[i])
            if cut.reuse:
                cute.arch.sync_threads()
            leave(share, sums, shared.partials, tiles, warp, lane)
            cute.arch.sync_threads()
            finish(shared, out, first_row, rank, thread)

        return body

    router_body = make_body(cut.router, multiply_float32)
    pooler_body = make_body(cut.pooler, multiply_bfloat16)

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
