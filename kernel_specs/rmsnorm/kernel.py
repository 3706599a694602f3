"""CuTe DSL kernel for `rmsnorm`: a cluster of CTAs per token, each thread keeps its vector in registers."""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.normed_row import NormedRow
from kernel_specs.primitives.row_cluster import launch_rows
from kernel_specs.primitives.vector import round_bfloat16


def rmsnorm(
    hidden_size: int,
    weighted: bool,
    gain_center: float,
    round_input: bool,
    threads: int,
    cluster: int,
    input_dtype: str,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    width = 4 if input_dtype == "float32" else 8  # 16-byte vectors of the input

    @cute.kernel
    def device(x: cute.Tensor, weight: cute.Tensor | None, out: cute.Tensor, eps: cutlass.Float32) -> None:
        row = NormedRow(hidden_size, threads, cluster, width)
        # The weight does not depend on the previous launch: its latency passes before the wait.
        if cutlass.const_expr(weighted):
            gain = row.load(weight) + gain_center
        row.ready()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        values = row.load(x[row.token, None])
        if cutlass.const_expr(round_input):
            values = round_bfloat16(values)
        normed = row.normed(values, eps)
        if cutlass.const_expr(weighted):
            normed = normed * gain
        row.store(out[row.token, None], normed)

    @cute.jit
    def host(*arguments) -> None:  # `weight` exists only when weighted
        x, *weight, out, eps, cuda_stream = arguments
        kernel = device(x, weight[0] if weighted else None, out, eps)
        launch_rows(kernel, x.shape[0], threads, cluster, cuda_stream)

    return host
