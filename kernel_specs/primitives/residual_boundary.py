"""The residual boundary of a row that a cluster of CTAs holds in registers: post norm, gated blend, next pre norm.

What it computes is in gated_residual_rmsnorm's spec. The branch comes from whoever has it, as FP32 values of the
thread's vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass
from cutlass import cute

from kernel_specs.primitives.normed_row import NormedRow
from kernel_specs.primitives.vector import round_bfloat16

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

    @property
    def weighted_post(self) -> bool:
        return self.post_norm == "input_scale"

    @property
    def draft(self) -> bool:
        return self.mode == "draft"

    def split(self, tensors: Sequence[cute.Tensor]) -> tuple[cute.Tensor | None, ...]:
        """stream, post_weight, alpha, beta, weight, activation, tap, router_input; None where there is none."""
        remaining = iter(tensors)
        stream = next(remaining)
        post_weight = next(remaining) if self.weighted_post else None
        alpha, beta, weight, activation = (next(remaining) for _ in range(4))
        tap = next(remaining) if self.write_tap else None
        router_input = next(remaining) if self.write_router_input else None
        return stream, post_weight, alpha, beta, weight, activation, tap, router_input


class BoundaryRow(NormedRow):
    """A thread's part of one row, from before `griddepcontrol.wait`: parameters do not depend on the launch before."""

    def __init__(self, boundary: Boundary, tensors: tuple[cute.Tensor | None, ...]) -> None:
        """`tensors` as `Boundary.split` returns them."""
        stream, post_weight, alpha, beta, weight, activation, tap, router_input = tensors
        super().__init__(boundary.hidden_size, boundary.threads, boundary.cluster, WIDTH, norms=2)
        self.boundary = boundary
        self.stream, self.activation, self.tap, self.router_input = stream, activation, tap, router_input
        if boundary.weighted_post:
            self.post_gain = self.load(post_weight) + 1.0
        self.keep = self.load(alpha)
        self.take = self.load(beta)
        self.gain = self.load(weight) + boundary.gain_center
        self.ready()

    def load_stream(self) -> None:
        """Behind the wait, and before the branch is there: its latency passes meanwhile."""
        self.previous = self.load(self.stream[self.token, None])

    def post_normed(self, branch: cute.TensorSSA, post_eps: cutlass.Float32) -> cute.TensorSSA:
        """y. All threads of the row have come here when it returns."""
        y = self.normed(branch * self.post_gain if self.boundary.weighted_post else branch, post_eps)
        return round_bfloat16(y) if self.boundary.draft else y

    def finish(self, y: cute.TensorSSA, eps: cutlass.Float32) -> None:
        """Blend, norm, and write all outputs."""
        x = self.keep * self.previous + self.take * y
        self.store(self.stream[self.token, None], x)
        if self.boundary.write_tap:
            self.store(self.tap[self.token, None], x)
        if self.boundary.draft:
            x = round_bfloat16(x)
        n = self.normed(x, eps) * self.gain
        self.store(self.activation[self.token, None], n)
        if self.boundary.write_router_input:
            self.store(self.router_input[self.token, None], n)
