"""CuTe DSL kernel for `rmsnorm_nvfp4_quantize`: a cluster of CTAs per token, two neighbouring lanes per scale."""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.nvfp4_codes import reciprocal
from kernel_specs.primitives.nvfp4_rows import quantize_vector
from kernel_specs.primitives.reduce import RowSum
from kernel_specs.primitives.row_split import VECTOR, thread_vectors
from kernel_specs.primitives.vector import dot, load_float32


def rmsnorm_nvfp4_quantize(
    hidden_size: int, packed_size: int, num_blocks: int, threads: int, cluster: int
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert threads * cluster * VECTOR == hidden_size
    assert packed_size * 2 == hidden_size and num_blocks * 16 == hidden_size

    @cute.kernel
    def device(
        x: cute.Tensor,
        weight: cute.Tensor,
        global_scale: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        eps: cutlass.Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token = block // cluster
        mine = thread_vectors(block % cluster, thread, threads, VECTOR)
        row_sum = RowSum(threads, cluster, exchanges=1)

        # Parameters do not depend on the previous launch: their latency passes before the wait.
        gain = load_float32(weight, mine, VECTOR) + 1.0
        scale = global_scale[0]
        inverse_scale = reciprocal(scale)
        row_sum.ready()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        values = load_float32(x[token, None], mine, VECTOR)
        square_sum = row_sum.all_reduce(0, dot(values, values))
        exact = values * cute.math.rsqrt(square_sum / hidden_size + eps, fastmath=True) * gain
        word, byte = quantize_vector(exact, scale, inverse_scale)
        cute.recast_tensor(codes[token, None], cutlass.Int32)[mine[0]] = word
        if thread % 2 == 0:
            scales[token, mine[0] // 2] = cutlass.Uint8(byte)

    @cute.jit
    def host(
        x: cute.Tensor,
        weight: cute.Tensor,
        global_scale: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        eps: cutlass.Float32,
        cuda_stream: object,
    ) -> None:
        device(x, weight, global_scale, codes, scales, eps).launch(
            grid=(x.shape[0] * cluster, 1, 1),
            block=(threads, 1, 1),
            cluster=(cluster, 1, 1) if cluster > 1 else None,
            stream=cuda_stream,
            min_blocks_per_mp=1,  # registers are not scarce: loads may all be issued before the first use
            use_pdl=True,
        )

    return host
