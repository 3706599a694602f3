"""Sums over a row that one CTA, or a cluster of CTAs, holds in registers.

Every thread of every CTA gets the same bits: partial sums are combined in an order that does not depend on timing.
"""

import cutlass
from cutlass import cute

WARP = 32
SLOTS_PER_LANE = 4  # one 16-byte read of shared memory


class RowSum:
    """Sums over the `cluster` CTAs of `threads` threads that share a row, in up to `exchanges` exchanges.

    Each exchange has slots of its own in shared memory (one per warp of the cluster) and may be used once per launch,
    so none of them needs a barrier to protect its slots.

    In a cluster each warp pushes its partial sum into every CTA's slots with st.async, which counts the bytes on the
    receiver's mbarrier: one one-way trip. A CTA leaves an exchange only when all slots have arrived, hence no CTA can
    exit while another one still writes into it.
    """

    def __init__(self, threads: int, cluster: int, exchanges: int) -> None:
        self.cluster = cluster
        self.warps = threads // WARP
        self.slots = self.warps * cluster
        assert self.slots in (1, 2, 4, 8, 16, WARP), "butterflies add powers of two"
        if self.slots > 1:
            self.partials = [_allocate_slots(self.slots) for _ in range(exchanges)]
        if cluster > 1:
            self.barriers = cute.arch.alloc_smem(cutlass.Int64, exchanges, alignment=8)
            _open_barriers(self.barriers, exchanges, cutlass.Float32.width // 8 * self.slots)
            cute.arch.cluster_arrive_relaxed()  # the fence in _open_barriers has released them

    def ready(self) -> None:
        """Wait until every CTA of the cluster has made its barriers. Call once, before the first exchange."""
        if self.cluster > 1:
            cute.arch.cluster_wait()

    def all_reduce(self, exchange: int, partial: cutlass.Float32) -> cutlass.Float32:
        """The sum of `partial` over all threads that share the row."""
        partial = butterfly(partial, WARP)
        if self.slots == 1:
            return partial
        if self.cluster > 1:
            _push(self.partials[exchange], self.barriers + exchange, partial, self.warps, self.cluster)
            cute.arch.mbarrier_wait(self.barriers + exchange, 0)
        else:
            _publish(self.partials[exchange], partial)
            cute.arch.sync_threads()
        # A lane adds four slots that it reads at once: cheaper than two more rounds of shuffles.
        width = min(SLOTS_PER_LANE, self.slots)
        lanes = self.slots // width
        received = cute.local_tile(self.partials[exchange], (width,), (cute.arch.lane_idx() % lanes,)).load()
        return butterfly(pairwise_sum([received[i] for i in range(width)]), lanes)


def pairwise_sum(values: list[cutlass.Float32]) -> cutlass.Float32:
    """The sum of a power of two of values in a tree: the shortest chain of dependent additions."""
    while len(values) > 1:
        values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def butterfly(value: cutlass.Float32, lanes: int) -> cutlass.Float32:
    """The sum over each group of `lanes` lanes; a + b == b + a, so all lanes of a group end with the same bits."""
    offset = lanes // 2
    while offset > 0:
        value = value + cute.arch.shuffle_sync_bfly(value, offset)
        offset //= 2
    return value


def _allocate_slots(slots: int) -> cute.Tensor:
    start = cute.arch.alloc_smem(cutlass.Float32, slots, alignment=16)
    return cute.make_tensor(start, cute.make_layout((slots,)))


@cute.jit
def _open_barriers(barriers: cute.Pointer, exchanges: cutlass.Constexpr, transfer_bytes: cutlass.Constexpr) -> None:
    """One mbarrier per exchange, which completes when its bytes have arrived."""
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        for exchange in cutlass.range_constexpr(exchanges):
            cute.arch.mbarrier_init(barriers + exchange, 1)
        cute.arch.mbarrier_init_fence()
        for exchange in cutlass.range_constexpr(exchanges):
            cute.arch.mbarrier_arrive_and_expect_tx(barriers + exchange, transfer_bytes)


@cute.jit
def _push(
    slots: cute.Tensor,
    barrier: cute.Pointer,
    partial: cutlass.Float32,
    warps: cutlass.Constexpr,
    cluster: cutlass.Constexpr,
) -> None:
    """Lane r of each warp stores the warp's sum into its slot in CTA r."""
    lane = cute.arch.lane_idx()
    slot = cute.arch.block_idx_in_cluster() * warps + cute.arch.warp_idx()
    if lane < cluster:
        cute.arch.store_async_dsmem(slots.iterator + slot, partial.bitcast(cutlass.Int32), barrier, lane)


@cute.jit
def _publish(slots: cute.Tensor, partial: cutlass.Float32) -> None:
    """Lane 0 of each warp stores the warp's sum into its slot."""
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()
    if lane == 0:
        slots[warp] = partial
