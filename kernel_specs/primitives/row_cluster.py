"""Kernels whose rows have a cluster of CTAs each: their launch, and where a thread is."""

from typing import Any

import cutlass
from cutlass import cute


class RowCluster:
    """The calling thread's place. Traced: make one per launch.

    `token` is the cluster's row, `part` this CTA's number of `cluster`, `thread` this thread's of `threads`.
    """

    def __init__(self, threads: int, cluster: int) -> None:
        self.threads, self.cluster = threads, cluster
        self.thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        self.warp, self.lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        self.token, self.part = block // cluster, block % cluster


def launch_rows(kernel: Any, num_rows: cutlass.Int32, threads: int, cluster: int, stream: object) -> None:
    """Launch `kernel`, which has been called with its arguments, with a cluster for each row."""
    kernel.launch(
        grid=(num_rows * cluster, 1, 1),
        block=(threads, 1, 1),
        cluster=(cluster, 1, 1) if cluster > 1 else None,
        stream=stream,
        min_blocks_per_mp=1,  # registers are not scarce: loads may all be issued before the first use
        use_pdl=True,
    )
