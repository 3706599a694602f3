"""CuTe DSL kernel for `gated_residual_rmsnorm`: a cluster of CTAs per token, one pass over memory.

What a thread reads stays in registers until it is written.
"""

from collections.abc import Callable
from typing import Any

import cutlass
from cutlass import cute

from kernel_specs.primitives.residual_boundary import Boundary, BoundaryRow
from kernel_specs.primitives.row_cluster import launch_rows


def gated_residual_rmsnorm(**statics: Any) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    boundary = Boundary(**statics)

    @cute.kernel
    def device(branch: cute.Tensor, tensors: tuple, post_eps: cutlass.Float32, eps: cutlass.Float32) -> None:
        row = BoundaryRow(boundary, tensors)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        z = row.load(branch[row.token, None])
        row.load_stream()
        row.finish(row.post_normed(z, post_eps), eps)

    @cute.jit
    def host(*arguments) -> None:  # which tensors exist depends on the statics: `split` names them
        branch, *tensors, post_eps, eps, cuda_stream = arguments
        kernel = device(branch, boundary.split(tensors), post_eps, eps)
        launch_rows(kernel, branch.shape[0], boundary.threads, boundary.cluster, cuda_stream)

    return host
