"""CuTe DSL kernel for `expert_combine_rmsnorm`: a cluster of CTAs per token, each thread keeps its columns of all rows.

`primitives/route_norms.py` norms and combines what a thread has summed over the partials.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.route_norms import VECTOR, RouteNorms
from kernel_specs.primitives.row_cluster import RowCluster, launch_rows
from kernel_specs.primitives.vector import load_float32, store_rounded


def expert_combine_rmsnorm(
    num_partials: int, num_experts_per_tok: int, moe_hidden_size: int, threads: int, cluster: int, rows_dtype: str
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream.

    The rows come typed, so `rows_dtype` has nothing left to decide.
    """
    k = num_experts_per_tok

    @cute.jit
    def add_row(total: cute.Tensor, row: cute.Tensor, mine: cutlass.Int32, present: cutlass.Boolean) -> None:
        """Absent rows are not read: they may hold anything."""
        if present:
            total.store(total.load() + load_float32(row, (mine,), VECTOR))

    @cute.kernel
    def device(
        rows: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        weight: cute.Tensor,
        out: cute.Tensor,
        eps: cutlass.Float32,
    ) -> None:
        here = RowCluster(threads, cluster)
        norms = RouteNorms(here, k, moe_hidden_size)
        norms.load(topk_ids, topk_weights, weight)
        norms.ready()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        totals = [cute.make_rmem_tensor((VECTOR,), cutlass.Float32) for _ in range(k)]
        for slot in cutlass.range_constexpr(k):
            totals[slot].fill(0.0)
        for partial in cutlass.range_constexpr(num_partials):
            for slot in cutlass.range_constexpr(k):
                add_row(totals[slot], rows[partial, here.token, slot, None], norms.mine, norms.present[slot])
        combined = norms.combine([total.load() for total in totals], eps)
        store_rounded(out[here.token, None], (norms.mine,), combined)

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
        kernel = device(rows, topk_ids, topk_weights, weight, out, eps)
        launch_rows(kernel, out.shape[0], threads, cluster, cuda_stream)

    return host
