"""CuTe DSL kernel for `expert_combine_rmsnorm`: a cluster of CTAs per token, each thread keeps its columns of all rows.

The sums of squares of a token's rows are reduced together, each group of lanes ending with one of them, and meet in
the shared memory of every CTA of the cluster in a fixed order.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.transfer import open_transfer
from kernel_specs.primitives.vector import load_float32, store_rounded

WARP = 32
VECTOR = 4
PAD = 4  # FP32 between the slots of two rows: a warp's 16-byte reads then touch every bank once


def expert_combine_rmsnorm(
    num_partials: int, num_experts_per_tok: int, moe_hidden_size: int, threads: int, cluster: int, rows_dtype: str
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert threads * cluster * VECTOR == moe_hidden_size
    k = num_experts_per_tok
    assert k in (2, 4, 8), "lanes split in halves"
    group = WARP // k  # lanes that end with the same row's sum
    warps = threads // WARP
    sources = warps * cluster
    slot_stride = sources + PAD

    @cute.jit
    def add_row(total: cute.Tensor, row: cute.Tensor, mine: cutlass.Int32, present: cutlass.Boolean) -> None:
        """Absent rows are not read: they may hold anything."""
        if present:
            total.store(total.load() + load_float32(row, (mine,), VECTOR))

    def sum_squares(scaled: list[cute.TensorSSA], lane: cutlass.Int32) -> cutlass.Float32:
        """The warp's sum of squares of row lane // group, in halves: fewer shuffles than one sum after the other."""
        values = [(row[0] * row[0] + row[1] * row[1]) + (row[2] * row[2] + row[3] * row[3]) for row in scaled]
        offset = WARP // 2
        while len(values) > 1:
            half = len(values) // 2
            upper = (lane & offset) != 0
            kept = [cutlass.select_(upper, values[half + i], values[i]) for i in range(half)]
            given = [cutlass.select_(upper, values[i], values[half + i]) for i in range(half)]
            values = [kept[i] + cute.arch.shuffle_sync_bfly(given[i], offset) for i in range(half)]
            offset //= 2
        while offset > 0:
            values[0] = values[0] + cute.arch.shuffle_sync_bfly(values[0], offset)
            offset //= 2
        return values[0]

    @cute.jit
    def exchange(
        slots: cute.Tensor,
        arrived: cute.Pointer | None,
        square_sum: cutlass.Float32,
        source: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Put the warp's sums into the slots of every CTA of the cluster, and wait for all others'."""
        target = slots.iterator + (lane // group) * slot_stride + source
        if cutlass.const_expr(cluster > 1):
            for first in cutlass.range_constexpr(0, cluster, group):
                receiver = first + lane % group
                if receiver < cluster:
                    cute.arch.store_async_dsmem(target, square_sum.bitcast(cutlass.Int32), arrived, receiver)
            cute.arch.mbarrier_wait(arrived, 0)
        else:
            if lane % group == 0:
                slots[(lane // group) * slot_stride + source] = square_sum
            cute.arch.sync_threads()

    def add_slots(slots: cute.Tensor, row: cutlass.Int32) -> cutlass.Float32:
        received = cute.local_tile(slots, (slot_stride,), (row,)).load()
        values = [received[i] for i in range(sources)]
        while len(values) > 1:
            values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]
        return values[0]

    @cute.kernel
    def device(
        rows: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
        eps: cutlass.Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        token, part = block // cluster, block % cluster
        mine = part * threads + thread
        start = cute.arch.alloc_smem(cutlass.Float32, k * slot_stride, alignment=16)
        slots = cute.make_tensor(start, cute.make_layout((k * slot_stride,)))
        arrived = None
        if cutlass.const_expr(cluster > 1):
            arrived = open_transfer(4 * k * sources)
            cute.arch.cluster_arrive_relaxed()

        # Parameters, and what was written two launches ago: their latency passes before the wait.
        gain = load_float32(weight, (mine,), VECTOR) + 1.0
        present = [topk_ids[token, slot] >= 0 for slot in range(k)]
        own_weight = topk_weights[token, lane // group]
        own_weight = cutlass.select_(topk_ids[token, lane // group] >= 0, own_weight, cutlass.Float32(0.0))
        if cutlass.const_expr(cluster > 1):
            cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        totals = [cute.make_rmem_tensor((VECTOR,), cutlass.Float32) for _ in range(k)]
        for slot in cutlass.range_constexpr(k):
            totals[slot].fill(0.0)
        for partial in cutlass.range_constexpr(num_partials):
            for slot in cutlass.range_constexpr(k):
                add_row(totals[slot], rows[partial, token, slot, None], mine, present[slot])
        scaled = [total.load() * gain for total in totals]
        exchange(slots, arrived, sum_squares(scaled, lane), part * warps + warp, lane)
        mean_square = add_slots(slots, lane // group) / moe_hidden_size
        own_factor = own_weight * cute.math.rsqrt(mean_square + eps, fastmath=True)
        combined = scaled[0] * cute.arch.shuffle_sync(own_factor, 0)
        for slot in cutlass.range_constexpr(1, k):
            combined = combined + scaled[slot] * cute.arch.shuffle_sync(own_factor, slot * group)
        store_rounded(out[token, None], (mine,), combined)

    @cute.jit
    def host(
        rows: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
        eps: cutlass.Float32,
        cuda_stream: object,
    ) -> None:
        device(rows, topk_ids, topk_weights, weight, out, eps).launch(
            grid=(out.shape[0] * cluster, 1, 1),
            block=(threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            stream=cuda_stream,
            min_blocks_per_mp=1,  # registers are not scarce: loads may all be issued before the first use
            use_pdl=True,
        )

    return host
