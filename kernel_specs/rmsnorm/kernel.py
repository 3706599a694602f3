"""CuTe DSL kernel for `rmsnorm`: a cluster of CTAs per token, each thread keeps its vector in registers."""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import RowSum
from kernel_specs.primitives.row_split import VECTOR, thread_vectors
from kernel_specs.primitives.vector import dot, load_float32, round_bfloat16, store_rounded


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
    assert threads * cluster * VECTOR == hidden_size
    width = 4 if input_dtype == "float32" else 8  # 16-byte vectors of the input

    @cute.kernel
    def device(x: cute.Tensor, weight: cute.Tensor | None, out: cute.Tensor, eps: cutlass.Float32) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token = block // cluster
        mine = thread_vectors(block % cluster, thread, threads, width)
        row_sum = RowSum(threads, cluster, exchanges=1)

        # The weight does not depend on the previous launch: its latency passes before the wait.
        if cutlass.const_expr(weighted):
            gain = load_float32(weight, mine, width) + gain_center
        row_sum.ready()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        values = load_float32(x[token, None], mine, width)
        if cutlass.const_expr(round_input):
            values = round_bfloat16(values)
        square_sum = row_sum.all_reduce(0, dot(values, values))
        normed = values * cute.math.rsqrt(square_sum / hidden_size + eps, fastmath=True)
        if cutlass.const_expr(weighted):
            normed = normed * gain
        store_rounded(out[token, None], mine, normed)

    @cute.jit
    def host(*arguments) -> None:  # `weight` exists only when weighted
        x, *weight, out, eps, cuda_stream = arguments
        device(x, weight[0] if weighted else None, out, eps).launch(
            grid=(x.shape[0] * cluster, 1, 1),
            block=(threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            stream=cuda_stream,
            min_blocks_per_mp=1,  # registers are not scarce: loads may all be issued before the first use
            use_pdl=True,
        )

    return host
