"""CuTe DSL kernel for `gated_residual_rmsnorm`: a cluster of CTAs per token, one pass over memory.

What a thread reads stays in registers until it is written.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import RowSum
from kernel_specs.primitives.row_split import VECTOR, thread_vectors
from kernel_specs.primitives.vector import dot, load_float32, round_bfloat16, store_rounded

# Elements of a 16-byte FP32 vector: a warp's accesses to the stream are then contiguous, as those to BF16 rows still
# are. Eight in a row would touch every second 16 bytes twice, which costs up to a quarter of the launch.
WIDTH = 4


def gated_residual_rmsnorm(
    hidden_size: int,
    post_norm: str,
    mode: str,
    gain_center: float,
    write_tap: bool,
    write_router_input: bool,
    threads: int,
    cluster: int,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert threads * cluster * VECTOR == hidden_size
    weighted_post = post_norm == "input_scale"
    draft = mode == "draft"

    @cute.kernel
    def device(
        branch: cute.Tensor,
        stream: cute.Tensor,
        post_weight: cute.Tensor | None,
        alpha: cute.Tensor,
        beta: cute.Tensor,
        weight: cute.Tensor,
        activation: cute.Tensor,
        tap: cute.Tensor | None,
        router_input: cute.Tensor | None,
        post_eps: cutlass.Float32,
        eps: cutlass.Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token = block // cluster
        mine = thread_vectors(block % cluster, thread, threads, WIDTH)
        row_sum = RowSum(threads, cluster, exchanges=2)

        # Parameters do not depend on the previous launch: their latency passes before the wait.
        if cutlass.const_expr(weighted_post):
            post_gain = load_float32(post_weight, mine, WIDTH) + 1.0
        keep = load_float32(alpha, mine, WIDTH)
        take = load_float32(beta, mine, WIDTH)
        gain = load_float32(weight, mine, WIDTH) + gain_center
        row_sum.ready()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        z = load_float32(branch[token, None], mine, WIDTH)
        previous = load_float32(stream[token, None], mine, WIDTH)
        if cutlass.const_expr(weighted_post):
            z = z * post_gain
        square_sum = row_sum.all_reduce(0, dot(z, z))
        y = z * cute.math.rsqrt(square_sum / hidden_size + post_eps, fastmath=True)
        if cutlass.const_expr(draft):
            y = round_bfloat16(y)
        x = keep * previous + take * y
        store_rounded(stream[token, None], mine, x)
        if cutlass.const_expr(write_tap):
            store_rounded(tap[token, None], mine, x)

        if cutlass.const_expr(draft):
            x = round_bfloat16(x)
        square_sum = row_sum.all_reduce(1, dot(x, x))
        normed = x * cute.math.rsqrt(square_sum / hidden_size + eps, fastmath=True) * gain
        store_rounded(activation[token, None], mine, normed)
        if cutlass.const_expr(write_router_input):
            store_rounded(router_input[token, None], mine, normed)

    @cute.jit
    def host(*arguments) -> None:  # which tensors exist depends on the statics, so the names are given here
        remaining = iter(arguments)
        branch, stream = next(remaining), next(remaining)
        post_weight = next(remaining) if weighted_post else None
        alpha, beta, weight, activation = (next(remaining) for _ in range(4))
        tap = next(remaining) if write_tap else None
        router_input = next(remaining) if write_router_input else None
        post_eps, eps, cuda_stream = remaining
        device(branch, stream, post_weight, alpha, beta, weight, activation, tap, router_input, post_eps, eps).launch(
            grid=(branch.shape[0] * cluster, 1, 1),
            block=(threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            stream=cuda_stream,
            min_blocks_per_mp=1,  # registers are not scarce: loads may all be issued before the first use
            use_pdl=True,
        )

    return host
