"""CuTe DSL kernel for `context_rmsnorm`: a cluster of CTAs per token, each thread keeps its vector in registers."""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.normed_row import NormedRow
from kernel_specs.primitives.row_cluster import launch_rows
from kernel_specs.primitives.vector import round_bfloat16


def context_rmsnorm(
    hidden_size: int, num_layers: int, gain_center: float, threads: int, cluster: int
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""

    @cute.kernel
    def device(
        context: cute.Tensor, weight: cute.Tensor, layer_weights: cute.Tensor, out: cute.Tensor, eps: cutlass.Float32
    ) -> None:
        row = NormedRow(hidden_size, threads, cluster, norms=2)
        # Weights do not depend on the previous launch: their latency passes before the wait.
        gain = row.load(weight) + gain_center
        gains = [row.load(layer_weights[layer, None]) + gain_center for layer in range(num_layers)]
        row.ready()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        x = round_bfloat16(row.normed(row.load(context[row.token, None]), eps) * gain)
        normed = row.normed(x, eps)
        for layer in cutlass.range_constexpr(num_layers):
            row.store(out[layer, row.token, None], normed * gains[layer])

    @cute.jit
    def host(
        context: cute.Tensor,
        weight: cute.Tensor,
        layer_weights: cute.Tensor,
        out: cute.Tensor,
        eps: cutlass.Float32,
        cuda_stream: object,
    ) -> None:
        kernel = device(context, weight, layer_weights, out, eps)
        launch_rows(kernel, context.shape[0], threads, cluster, cuda_stream)

    return host
