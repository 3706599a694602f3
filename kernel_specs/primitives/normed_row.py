"""A row of channels that a cluster of CTAs holds in registers, and its RMS norms."""

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import RowSum
from kernel_specs.primitives.row_cluster import RowCluster
from kernel_specs.primitives.row_split import VECTOR, thread_vectors
from kernel_specs.primitives.vector import dot, load_float32, store_rounded


class NormedRow:
    """A thread's part of row `token`: VECTOR channels, as vectors `mine` of `width` elements each.

    Traced: made before `griddepcontrol.wait`, where gains may be loaded; `ready` comes before the wait too. `norms` is
    how often `normed` will be called.
    """

    def __init__(self, hidden_size: int, threads: int, cluster: int, width: int = VECTOR, norms: int = 1) -> None:
        assert threads * cluster * VECTOR == hidden_size
        here = RowCluster(threads, cluster)
        self.token, self.part, self.thread = here.token, here.part, here.thread
        self.hidden_size, self.width = hidden_size, width
        self.mine = thread_vectors(here.part, here.thread, threads, width)
        self.row_sum = RowSum(threads, cluster, exchanges=norms)
        self.normed_before = 0

    def load(self, row: cute.Tensor) -> cute.TensorSSA:
        """The thread's channels of `row`, widened to FP32."""
        return load_float32(row, self.mine, self.width)

    def store(self, row: cute.Tensor, values: cute.TensorSSA) -> None:
        """Store the thread's channels, rounded to the row's dtype."""
        store_rounded(row, self.mine, values)

    def ready(self) -> None:
        """Wait until every CTA of the cluster can receive. Call once, before the first norm."""
        self.row_sum.ready()

    def normed(self, values: cute.TensorSSA, eps: cutlass.Float32) -> cute.TensorSSA:
        """values * rsqrt(mean(values^2) + eps), the mean over the row. All of its threads are here when it returns."""
        square_sum = self.row_sum.all_reduce(self.normed_before, dot(values, values))
        self.normed_before += 1
        return values * cute.math.rsqrt(square_sum / self.hidden_size + eps, fastmath=True)
