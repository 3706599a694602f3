"""The residual boundary of a row that a cluster of CTAs holds in registers: post norm, gated blend, next pre norm.

What it computes is in gated_residual_rmsnorm's spec. The branch comes from whoever has it, as FP32 values of the
thread's vectors.
"""

from dataclasses import dataclass

import cutlass
from cutlass import cute

from kernel_specs.primitives.reduce import RowSum
from kernel_specs.primitives.row_split import VECTOR, thread_vectors
from kernel_specs.primitives.vector import dot, load_float32, round_bfloat16, store_rounded

# Elements of a 16-byte FP32 vector: a warp's accesses to the stream are then contiguous, as those to BF16 rows still
# are. Eight in a row would touch every second 16 bytes twice, which costs up to a quarter of the launch.
WIDTH = 4


@dataclass(frozen=True, slots=True)
class Boundary:
    """What a boundary's statics say."""

    hidden_size: int
    post_norm: str
    mode: str
    gain_center: float
    write_tap: bool
    write_router_input: bool
    threads: int
    cluster: int

    def __post_init__(self) -> None:
        assert self.threads * self.cluster * VECTOR == self.hidden_size

    @property
    def weighted_post(self) -> bool:
        return self.post_norm == "input_scale"

    @property
    def draft(self) -> bool:
        return self.mode == "draft"

    def split(self, tensors: list) -> tuple:
        """stream, post_weight, alpha, beta, weight, activation, tap, router_input; None where there is none."""
        remaining = iter(tensors)
        stream = next(remaining)
        post_weight = next(remaining) if self.weighted_post else None
        alpha, beta, weight, activation = (next(remaining) for _ in range(4))
        tap = next(remaining) if self.write_tap else None
        router_input = next(remaining) if self.write_router_input else None
        return stream, post_weight, alpha, beta, weight, activation, tap, router_input


class BoundaryRow:
    """A thread's part of one row, from before `griddepcontrol.wait`: parameters do not depend on the launch before."""

    def __init__(self, boundary: Boundary, post_weight, alpha, beta, weight) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        self.boundary = boundary
        self.token, self.part = block // boundary.cluster, block % boundary.cluster
        self.mine = thread_vectors(self.part, thread, boundary.threads, WIDTH)
        self.row_sum = RowSum(boundary.threads, boundary.cluster, exchanges=2)
        if boundary.weighted_post:
            self.post_gain = load_float32(post_weight, self.mine, WIDTH) + 1.0
        self.keep = load_float32(alpha, self.mine, WIDTH)
        self.take = load_float32(beta, self.mine, WIDTH)
        self.gain = load_float32(weight, self.mine, WIDTH) + boundary.gain_center
        self.row_sum.ready()

    def load_stream(self, stream: cute.Tensor) -> None:
        """Behind the wait, and before the branch is there: its latency passes meanwhile."""
        self.stream = stream[self.token, None]
        self.previous = load_float32(self.stream, self.mine, WIDTH)

    def post_normed(self, branch: cute.TensorSSA, post_eps: cutlass.Float32) -> cute.TensorSSA:
        """y. All threads of the row have come here when it returns."""
        z = branch * self.post_gain if self.boundary.weighted_post else branch
        square_sum = self.row_sum.all_reduce(0, dot(z, z))
        y = z * cute.math.rsqrt(square_sum / self.boundary.hidden_size + post_eps, fastmath=True)
        return round_bfloat16(y) if self.boundary.draft else y

    def finish(self, y: cute.TensorSSA, activation, tap, router_input, eps: cutlass.Float32) -> None:
        """Blend, norm, and write all outputs."""
        boundary = self.boundary
        x = self.keep * self.previous + self.take * y
        store_rounded(self.stream, self.mine, x)
        if boundary.write_tap:
            store_rounded(tap[self.token, None], self.mine, x)
        if boundary.draft:
            x = round_bfloat16(x)
        square_sum = self.row_sum.all_reduce(1, dot(x, x))
        normed = x * cute.math.rsqrt(square_sum / boundary.hidden_size + eps, fastmath=True) * self.gain
        store_rounded(activation[self.token, None], self.mine, normed)
        if boundary.write_router_input:
            store_rounded(router_input[self.token, None], self.mine, normed)
