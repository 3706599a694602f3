"""CuTe DSL kernel for `gated_residual_rmsnorm`: a cluster of CTAs per token, one pass over memory.

What a thread reads stays in registers until it is written.
"""

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import cute

from kernel_specs.primitives.residual_boundary import WIDTH, Boundary, BoundaryRow
from kernel_specs.primitives.vector import load_float32


def gated_residual_rmsnorm(**statics: Any) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    boundary = Boundary(**statics)

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
        row = BoundaryRow(boundary, post_weight, alpha, beta, weight)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        z = load_float32(branch[row.token, None], row.mine, WIDTH)
        row.load_stream(stream)
        y = row.post_normed(z, post_eps)
        row.finish(y, activation, tap, router_input, eps)

    @cute.jit
    def host(*arguments) -> None:  # which tensors exist depends on the statics, so the names are given here
        branch, *tensors = arguments[:-3]
        post_eps, eps, cuda_stream = arguments[-3:]
        device(branch, *boundary.split(tensors), post_eps, eps).launch(
            grid=(branch.shape[0] * boundary.cluster, 1, 1),
            block=(boundary.threads, 1, 1),
            cluster=(boundary.cluster, 1, 1) if boundary.cluster > 1 else None,
            stream=cuda_stream,
            min_blocks_per_mp=1,  # registers are not scarce: loads may all be issued before the first use
            use_pdl=True,
        )

    return host
