"""Sums over a row that one CTA, or a cluster of CTAs, holds in registers.

Every thread of every CTA gets the same bits: partial sums are combined in an order that does not depend on timing.
"""

import cutlass
from cutlass import cute

WARP = 32
# How many sums one exchange can carry: what a single st.async can store (1, 2 or 4 words).
SUMS_PER_EXCHANGE = (1, 2, 4)


class RowSum:
    """Exchanges of partial sums between the `cluster` CTAs of `threads` threads that share a row.

    `sums[i]` is how many sums exchange i carries. Each exchange has slots of its own in shared memory (one per warp
    of the cluster) and may be used once per launch, so none of them needs a barrier to protect its slots.

    In a cluster each warp pushes its partial sums into every CTA's slots with st.async, which counts the bytes on the
    receiver's mbarrier: one one-way trip. A CTA leaves an exchange only when all slots have arrived, hence no CTA can
    exit while another one still writes into it.
    """

    def __init__(self, threads: int, cluster: int, sums: tuple[int, ...]) -> None:
        self.cluster = cluster
        self.warps = threads // WARP
        self.slots = self.warps * cluster
        self.sums = sums
        assert self.slots in (1, 2, 4, 8, 16, WARP), "one lane reads each slot, a butterfly adds them"
        assert all(count in SUMS_PER_EXCHANGE for count in sums)
        if self.slots > 1:
            self.partials = [_allocate_slots(self.slots, count) for count in sums]
        if cluster > 1:
            self.barriers = cute.arch.alloc_smem(cutlass.Int64, len(sums), alignment=8)
            _open_barriers(self.barriers, tuple(4 * count * self.slots for count in sums))
            cute.arch.cluster_arrive_relaxed()  # the fence in _open_barriers has released them

    def ready(self) -> None:
        """Wait until every CTA of the cluster has made its barriers. Call once, before the first exchange."""
        if self.cluster > 1:
            cute.arch.cluster_wait()

    def all_reduce(self, exchange: int, partials: tuple[cutlass.Float32, ...]) -> tuple[cutlass.Float32, ...]:
        """The sums of this thread's `partials` over all threads that share the row."""
        assert len(partials) == self.sums[exchange]
        partials = butterfly(partials, WARP)
        if self.slots == 1:
            return partials
        if self.cluster > 1:
            _push(self.partials[exchange], self.barriers + exchange, partials, self.warps, self.cluster)
            cute.arch.mbarrier_wait(self.barriers + exchange, 0)
        else:
            _publish(self.partials[exchange], partials)
            cute.arch.sync_threads()
        received = self.partials[exchange][cute.arch.lane_idx() % self.slots, None].load()
        return butterfly(tuple(received[i] for i in range(len(partials))), self.slots)


def _allocate_slots(slots: int, count: int) -> cute.Tensor:
    start = cute.arch.alloc_smem(cutlass.Float32, slots * count, alignment=16)
    return cute.make_tensor(start, cute.make_layout((slots, count), stride=(count, 1)))


def butterfly(values: tuple[cutlass.Float32, ...], lanes: int) -> tuple[cutlass.Float32, ...]:
    """Sums over groups of `lanes` lanes; a + b == b + a, so all lanes of a group end with the same bits."""
    offset = lanes // 2
    while offset > 0:
        values = tuple(value + cute.arch.shuffle_sync_bfly(value, offset) for value in values)
        offset //= 2
    return values


@cute.jit
def _open_barriers(barriers: cute.Pointer, transfers: cutlass.Constexpr) -> None:
    """One mbarrier per exchange, which completes when its bytes have arrived."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        for exchange in cutlass.range_constexpr(len(transfers)):
            cute.arch.mbarrier_init(barriers + exchange, 1)
        cute.arch.mbarrier_init_fence()
        for exchange in cutlass.range_constexpr(len(transfers)):
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + exchange, transfers[exchange])


@cute.jit
def _push(
    slots: cute.Tensor,
    barrier: cute.Pointer,
    partials: tuple[cutlass.Float32, ...],
    warps: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
) -> None:
    """Lane r of each warp stores the warp's sums into its slot in CTA r."""
    lane = cute.arch.lane_idx()
    slot = cute.arch.block_idx_in_cluster() * warps + cute.arch.warp_idx()
    if lane < cluster:
        words = tuple(partial.bitcast(cutlass.Int32) for partial in partials)
        word = words if cutlass.const_expr(len(words) > 1) else words[0]
        cute.arch.store_async_dsmem(slots[slot, None].iterator, word, barrier, lane)


@cute.jit
def _publish(slots: cute.Tensor, partials: tuple[cutlass.Float32, ...]) -> None:
    """Lane 0 of each warp stores the warp's sums into its slot."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()
    if lane == 0:
        for i in cutlass.range_constexpr(len(partials)):
            slots[warp, i] = partials[i]
