"""CuTe DSL kernel for `context_rmsnorm`: a cluster of CTAs per token, each thread keeps its vector in registers."""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import RowSum
from kernel_specs.primitives.row_split import VECTOR, thread_vectors
from kernel_specs.primitives.vector import dot, load_float32, round_bfloat16, store_rounded


def context_rmsnorm(
    hidden_size: int, num_layers: int, gain_center: float, threads: int, cluster: int
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert threads * cluster * VECTOR == hidden_size

    @cute.kernel
    def device(
        context: cute.Tensor, weight: cute.Tensor, layer_weights: cute.Tensor, out: cute.Tensor, eps: cutlass.Float32
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token = block // cluster
        mine = thread_vectors(block % cluster, thread, threads, VECTOR)
        row_sum = RowSum(threads, cluster, exchanges=2)

        # Weights do not depend on the previous launch: their latency passes before the wait.
        gain = load_float32(weight, mine, VECTOR) + gain_center
        gains = [load_float32(layer_weights[layer, None], mine, VECTOR) + gain_center for layer in range(num_layers)]
        row_sum.ready()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        values = load_float32(context[token, None], mine, VECTOR)
        square_sum = row_sum.all_reduce(0, dot(values, values))
        x = round_bfloat16(values * cute.math.rsqrt(square_sum / hidden_size + eps, fastmath=True) * gain)
        square_sum = row_sum.all_reduce(1, dot(x, x))
        normed = x * cute.math.rsqrt(square_sum / hidden_size + eps, fastmath=True)
        for layer in cutlass.range_constexpr(num_layers):
            store_rounded(out[layer, token, None], mine, normed * gains[layer])

    @cute.jit
    def host(
        context: cute.Tensor,
        weight: cute.Tensor,
        layer_weights: cute.Tensor,
        out: cute.Tensor,
        eps: cutlass.Float32,
        stream: object,
    ) -> None:
        device(context, weight, layer_weights, out, eps).launch(
            grid=(context.shape[0] * cluster, 1, 1),
            block=(threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,  # registers are not scarce: loads may all be issued before the first use
            use_pdl=True,
        )

    return host
