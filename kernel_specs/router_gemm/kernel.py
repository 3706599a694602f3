"""CuTe DSL kernel for `router_gemm`: 16 experts and a part of K per CTA, the whole of it in flight at once.

The warps ask for all of the CTA's weights with bulk copies, a stage (a slab of 256 columns) after the other;
`primitives/router_products.py` has what they do with them.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.bulk import bulk_copy
from kernel_specs.primitives.router_products import leave, load_tokens, multiply_float32, send_item, store_item
from kernel_specs.primitives.transfer import open_transfer
from kernel_specs.router_gemm.share import (
    BLOCK,
    ITEM,
    LANE_COLUMNS,
    PARTS,
    ROWS,
    SLAB,
    THREADS,
    TOKENS,
    WARPS,
    router_share,
)

PASS_TILES = 4  # with more tokens at a time the registers would not suffice for two CTAs per SM


def router_gemm(num_experts: int, hidden_size: int, max_tokens: int, split: int) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    columns = hidden_size // split  # of a CTA
    tiles = -(-max_tokens // TOKENS)
    # with few tokens the parts' MMAs need not wait for each other
    share = router_share(columns, tiles, split, chains=PARTS if tiles <= 2 else 2)
    assert share.items <= THREADS, "a thread adds up one item"
    stages = share.slabs
    passes = [range(first, min(first + PASS_TILES, tiles)) for first in range(0, tiles, PASS_TILES)]

    @cute.jit
    def open_stages(full: cute.Pointer, rows: cutlass.Int32, thread: cutlass.Int32) -> None:
        """One mbarrier per stage, which completes when `rows` rows of it have arrived."""
        if thread == 0:
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init_fence()
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, rows * (SLAB * 4))

    @cute.jit
    def request(
        weight: cute.Tensor,
        ring: cute.Pointer,
        full: cute.Pointer,
        first_row: cutlass.Int32,
        rank: cutlass.Int32,
        warp: cutlass.Int32,
    ) -> None:
        """Every warp asks for its rows' parts of all stages; rows past the last expert are left as they are."""
        for stage in cutlass.range_constexpr(stages):
            for i in cutlass.range_constexpr(ROWS // WARPS):
                row = warp * (ROWS // WARPS) + i
                column = rank * columns + stage * SLAB
                if first_row + row < num_experts:
                    source = weight.iterator + cute.assume((first_row + row) * hidden_size + column, SLAB)
                    with cute.arch.elect_one():
                        bulk_copy(ring + row * share.stride + stage * SLAB, source, SLAB * 4, full + stage)

    @cute.kernel
    def device(activation: cute.Tensor, weight: cute.Tensor, logits: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        first_row, rank = block // split * ROWS, block % split
        ring = cute.arch.alloc_smem(cutlass.Float32, share.ring_bytes // 4, alignment=128)
        partials = cute.arch.alloc_smem(cutlass.Float32, share.partial_bytes // 4, alignment=128)
        received = cute.arch.alloc_smem(cutlass.Float32, share.received_bytes // 4, alignment=128)
        full = cute.arch.alloc_smem(cutlass.Int64, stages, alignment=8)
        open_stages(full, cutlass.min(ROWS, num_experts - first_row), thread)
        arrived = open_transfer(share.received_bytes)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        # The weight does not depend on the previous launch: all of it is asked for before the wait.
        request(weight, ring, full, first_row, rank, warp)
        cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        first_column = rank * columns + warp * BLOCK
        # A step is a pass' tiles and a stage; the activations of `ahead` steps are on their way.
        steps = [(tiles, stage) for tiles in passes for stage in range(stages)]
        ahead = stages if share.tiles <= 2 else 2
        coming = [load_tokens(activation, tiles, first_column + stage * SLAB, lane) for tiles, stage in steps[:ahead]]
        sums = cute.make_rmem_tensor((share.chains * len(passes[0]) * ITEM,), cutlass.Float32)
        for number in cutlass.range_constexpr(len(steps)):
            tiles, stage = steps[number]
            if cutlass.const_expr(stage == 0):
                sums.fill(0.0)
            cute.arch.mbarrier_wait(full + stage, 0)
            at = lane // 4 * share.stride + stage * SLAB + warp * BLOCK + lane % 4 * LANE_COLUMNS
            multiply_float32(share, sums, ring, at, coming[number])
            if cutlass.const_expr(number + ahead < len(steps)):
                later_tiles, later_stage = steps[number + ahead]
                coming.append(load_tokens(activation, later_tiles, first_column + later_stage * SLAB, lane))
            if cutlass.const_expr(stage == stages - 1):
                leave(share, sums, partials, tiles, warp, lane)
        cute.arch.sync_threads()
        if thread < share.items:
            send_item(share, partials, received, arrived, thread, rank)
        if thread < share.owned:
            store_item(share, received, arrived, logits, first_row, thread, rank)

    @cute.jit
    def host(activation: cute.Tensor, weight: cute.Tensor, logits: cute.Tensor, cuda_stream: object) -> None:
        device(activation, weight, logits).launch(
            grid=(-(-num_experts // ROWS) * split, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(split, 1, 1),
            stream=cuda_stream,
            use_pdl=True,
        )

    return host
