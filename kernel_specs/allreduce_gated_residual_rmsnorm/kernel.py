"""CuTe DSL kernel for `allreduce_gated_residual_rmsnorm`: a cluster of CTAs per token, as in gated_residual_rmsnorm.

In one shot a thread sends its columns of the partial row to every rank, then sums what arrives in its place from all of
them; `two_shot` has the other way.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.allreduce_gated_residual_rmsnorm.two_shot import TwoShot
from kernel_specs.primitives.exchange import (
    Inbox,
    count_epoch,
    full,
    limit_of,
    load_word,
    receive,
    send,
    sum_in_rank_order,
)
from kernel_specs.primitives.inbox import EPOCH_COLUMNS
from kernel_specs.primitives.residual_boundary import WIDTH, Boundary, BoundaryRow
from kernel_specs.primitives.row_cluster import launch_rows
from kernel_specs.primitives.row_split import VECTOR
from kernel_specs.primitives.vector import round_bfloat16

COUNT = VECTOR // WIDTH  # packets of a thread: four columns of BF16 each


def allreduce_gated_residual_rmsnorm(
    hidden_size: int,
    shard_size: int,
    world_size: int,
    threads: int,
    cluster: int,
    round_sum: bool,
    shots: int,
    **statics,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    boundary = Boundary(hidden_size=hidden_size, threads=threads, cluster=cluster, **statics)

    @cute.kernel
    def device(
        partial: cute.Tensor,
        inbox: cute.Tensor | None,
        peers: cute.Tensor | None,
        row_inbox: cute.Tensor | None,
        row_peers: cute.Tensor | None,
        sum_inbox: cute.Tensor | None,
        sum_peers: cute.Tensor | None,
        epochs: cute.Tensor,
        failure: cute.Tensor,
        tensors: tuple,
        rank: cutlass.Int32,
        timeout_us: cutlass.Int32,
        post_eps: cutlass.Float32,
        eps: cutlass.Float32,
    ) -> None:
        row = BoundaryRow(boundary, tensors)
        if cutlass.const_expr(shots == 1):
            mail = Inbox(inbox, peers, rank, world_size, partial.shape[0], hidden_size // WIDTH)
            targets = [mail.address_of(ahead) for ahead in range(world_size)]
        else:
            inboxes = (row_inbox, row_peers, sum_inbox, sum_peers)
            exchange = TwoShot(row, inboxes, rank, partial.shape[0], world_size, shard_size)
        counter = row.token * EPOCH_COLUMNS + row.part
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        epoch = load_word(epochs, counter)
        limit = limit_of(failure, timeout_us)
        words = cute.recast_tensor(partial[row.token, None], cutlass.Int64)
        own = [full(words[vector], "bfloat16") for vector in row.mine]
        if cutlass.const_expr(shots == 1):
            mail.open(epoch)
            for ahead in cutlass.range_constexpr(world_size):
                slot = (ahead + 1) % world_size  # this rank's own inbox last: others wait longer
                for i in cutlass.range_constexpr(COUNT):
                    send(mail.place(targets[slot], slot, row.token, row.mine[i]), own[i])
        else:
            exchange.send_row(own, epoch)
        row.load_stream()

        if cutlass.const_expr(shots == 1):
            arriving = [
                (mail.place_from(source, row.token, vector), source)
                for source in range(world_size)
                for vector in row.mine
            ]
            branch = sum_in_rank_order(receive(arriving, limit, failure), world_size, COUNT, cutlass.BFloat16)
        else:
            branch = exchange.branch(limit, failure)
        if cutlass.const_expr(round_sum):
            branch = round_bfloat16(branch)
        y = row.post_normed(branch, post_eps)
        count_epoch(epochs, counter, epoch)
        row.finish(y, eps)

    @cute.jit
    def host(*arguments) -> None:  # which tensors exist depends on the statics: names are given here and in `split`
        partial, *remaining = arguments[:-5]
        inboxes = [remaining.pop(0) for _ in range(2 if shots == 1 else 4)]
        inboxes = [*inboxes, *[None] * 4] if shots == 1 else [None, None, *inboxes]
        epochs, failure, *tensors = remaining
        scalars = arguments[-5:-1]
        kernel = device(partial, *inboxes, epochs, failure, boundary.split(tensors), *scalars)
        launch_rows(kernel, partial.shape[0], threads, cluster, arguments[-1])

    return host
