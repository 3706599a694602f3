"""A token's rows of the routed experts, normed together, weighted and summed: by a cluster that holds their columns.

The sums of squares of a token's rows are reduced together, each group of lanes ending with one of them, and meet in
the shared memory of every CTA of the cluster in a fixed order.
"""

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import WARP, pairwise_sum
from kernel_specs.primitives.row_cluster import RowCluster
from kernel_specs.primitives.transfer import open_transfer
from kernel_specs.primitives.vector import load_float32

VECTOR = 4  # columns of a thread
PAD = 4  # FP32 between the slots of two rows: a warp's 16-byte reads then touch every bank once


class RouteNorms:
    """A thread's part of one token's `k` rows: the VECTOR columns `mine` of each. One use per launch, by all threads.

    Made, and `load`ed, before `griddepcontrol.wait`.
    """

    def __init__(self, here: RowCluster, k: int, moe_hidden_size: int) -> None:
        assert here.threads * here.cluster * VECTOR == moe_hidden_size
        assert k in (2, 4, 8), "lanes split in halves"
        self.here, self.k, self.moe_hidden_size = here, k, moe_hidden_size
        self.mine = here.part * here.threads + here.thread
        self.group = WARP // k  # lanes that end with the same row's sum
        self.warps = here.threads // WARP
        self.sources = self.warps * here.cluster
        self.slot_stride = self.sources + PAD
        start = cute.arch.alloc_smem(cutlass.Float32, k * self.slot_stride, alignment=16)
        self.slots = cute.make_tensor(start, cute.make_layout((k * self.slot_stride,)))
        self.arrived = None
        if here.cluster > 1:
            self.arrived = open_transfer(4 * k * self.sources)
            cute.arch.cluster_arrive_relaxed()

    def load(self, topk_ids: cute.Tensor, topk_weights: cute.Tensor, weight: cute.Tensor) -> None:
        """Parameters, and what was written two launches ago: their latency passes before the wait.

        `present` tells of each row whether it is there; absent rows weigh nothing.
        """
        self.gain = load_float32(weight, (self.mine,), VECTOR) + 1.0
        token = self.here.token
        self.present = [topk_ids[token, slot] >= 0 for slot in range(self.k)]
        own = self.here.lane // self.group
        own_weight = topk_weights[token, own]
        self.own_weight = cutlass.select_(topk_ids[token, own] >= 0, own_weight, cutlass.Float32(0.0))

    def ready(self) -> None:
        """Wait until every CTA of the cluster can receive. Call once, before `combine`."""
        if self.here.cluster > 1:
            cute.arch.cluster_wait()

    def combine(self, rows: list[cute.TensorSSA], eps: cutlass.Float32) -> cute.TensorSSA:
        """The sum of the rows (FP32, zeros where absent), each times the gain, normed and times its weight."""
        scaled = [row * self.gain for row in rows]
        square_sum = self._sum_squares(scaled)
        source = self.here.part * self.warps + self.here.warp
        cluster = self.here.cluster
        _exchange(self.slots, self.arrived, square_sum, source, self.here.lane, self.group, self.slot_stride, cluster)
        received = cute.local_tile(self.slots, (self.slot_stride,), (self.here.lane // self.group,)).load()
        mean_square = pairwise_sum([received[i] for i in range(self.sources)]) / self.moe_hidden_size
        own_factor = self.own_weight * cute.math.rsqrt(mean_square + eps, fastmath=True)
        combined = scaled[0] * cute.arch.shuffle_sync(own_factor, 0)
        for slot in range(1, self.k):
            combined = combined + scaled[slot] * cute.arch.shuffle_sync(own_factor, slot * self.group)
        return combined

    def _sum_squares(self, scaled: list[cute.TensorSSA]) -> cutlass.Float32:
        """The warp's sum of squares of row lane // group, in halves: fewer shuffles than one sum after the other."""
        values = [(row[0] * row[0] + row[1] * row[1]) + (row[2] * row[2] + row[3] * row[3]) for row in scaled]
        offset = WARP // 2
        while len(values) > 1:
            half = len(values) // 2
            upper = (self.here.lane & offset) != 0
            kept = [cutlass.select_(upper, values[half + i], values[i]) for i in range(half)]
            given = [cutlass.select_(upper, values[i], values[half + i]) for i in range(half)]
            values = [kept[i] + cute.arch.shuffle_sync_bfly(given[i], offset) for i in range(half)]
            offset //= 2
        while offset > 0:
            values[0] = values[0] + cute.arch.shuffle_sync_bfly(values[0], offset)
            offset //= 2
        return values[0]


@cute.jit
def _exchange(
    slots: cute.Tensor,
    arrived: cute.Pointer | None,
    square_sum: cutlass.Float32,
    source: cutlass.Int32,
    lane: cutlass.Int32,
    group: cutlass.Constexpr,
    slot_stride: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
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
