"""A one-off transfer into a CTA's shared memory from the CTAs of its cluster, which an mbarrier counts in bytes.

The receiver calls `open_transfer` at its start. Every CTA of the cluster arrives at the cluster's barrier behind that,
and waits there before it sends with `cute.arch.store_async_dsmem`. The receiver calls
`cute.arch.mbarrier_wait(arrived, 0)` before it reads.
"""

import cutlass
from cutlass import cute


def open_transfer(num_bytes: cutlass.Int32) -> cute.Pointer:
    """An mbarrier that completes when `num_bytes` have arrived; a relaxed arrival at the cluster's barrier shows it."""
    arrived = cute.arch.alloc_smem(cutlass.Int64, 1, alignment=8)
    _initialize(arrived, num_bytes)
    return arrived


@cute.jit
def _initialize(arrived: cute.Pointer, num_bytes: cutlass.Int32) -> None:
    thread, _, _ = cute.arch.thread_idx()
    if thread == 0:
        cute.arch.mbarrier_init(arrived, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.mbarrier_arrive_and_expect_tx(arrived, num_bytes)
