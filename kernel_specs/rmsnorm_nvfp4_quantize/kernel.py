"""CuTe DSL kernel for `rmsnorm_nvfp4_quantize`: a cluster of CTAs per token, two neighbouring lanes per scale."""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.normed_row import NormedRow
from kernel_specs.primitives.nvfp4_codes import reciprocal
from kernel_specs.primitives.nvfp4_rows import quantize_vector
from kernel_specs.primitives.row_cluster import launch_rows


def rmsnorm_nvfp4_quantize(
    hidden_size: int, packed_size: int, num_blocks: int, threads: int, cluster: int
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
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
        row = NormedRow(hidden_size, threads, cluster)
        # Parameters do not depend on the previous launch: their latency passes before the wait.
        gain = row.load(weight) + 1.0
        scale = global_scale[0]
        inverse_scale = reciprocal(scale)
        row.ready()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        exact = row.normed(row.load(x[row.token, None]), eps) * gain
        word, byte = quantize_vector(exact, scale, inverse_scale)
        vector = row.mine[0]
        cute.recast_tensor(codes[row.token, None], cutlass.Int32)[vector] = word
        if row.thread % 2 == 0:
            scales[row.token, vector // 2] = cutlass.Uint8(byte)

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
        kernel = device(x, weight, global_scale, codes, scales, eps)
        launch_rows(kernel, x.shape[0], threads, cluster, cuda_stream)

    return host
