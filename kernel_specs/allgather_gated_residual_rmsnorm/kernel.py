"""CuTe DSL kernel for `allgather_gated_residual_rmsnorm`: a cluster of CTAs per token, as in gated_residual_rmsnorm.

A row has as many packets as all ranks' copies of a shard: the thread that receives packet v of a row also sends one,
packet v mod (those of a shard) to the rank v / (those of a shard) places behind this one.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.exchange import (
    Inbox,
    count_epoch,
    full,
    limit_of,
    load_word,
    receive,
    send,
    values_of,
)
from kernel_specs.primitives.inbox import EPOCH_COLUMNS
from kernel_specs.primitives.residual_boundary import WIDTH, Boundary, BoundaryRow
from kernel_specs.primitives.row_cluster import launch_rows
from kernel_specs.primitives.row_split import VECTOR

COUNT = VECTOR // WIDTH  # packets of a thread: four columns of BF16 each


def allgather_gated_residual_rmsnorm(
    hidden_size: int, shard_size: int, world_size: int, threads: int, cluster: int, **statics
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert shard_size * world_size == hidden_size
    boundary = Boundary(hidden_size=hidden_size, threads=threads, cluster=cluster, **statics)
    shard_packets = shard_size // WIDTH

    @cute.kernel
    def device(
        shard: cute.Tensor,
        inbox: cute.Tensor,
        peers: cute.Tensor,
        epochs: cute.Tensor,
        failure: cute.Tensor,
        tensors: tuple,
        rank: cutlass.Int32,
        timeout_us: cutlass.Int32,
        post_eps: cutlass.Float32,
        eps: cutlass.Float32,
    ) -> None:
        row = BoundaryRow(boundary, tensors)
        mail = Inbox(inbox, peers, rank, world_size, shard.shape[0], shard_packets)
        targets = [mail.address_of(vector // shard_packets) for vector in row.mine]
        counter = row.token * EPOCH_COLUMNS + row.part
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        epoch = load_word(epochs, counter)
        limit = limit_of(failure, timeout_us)
        words = cute.recast_tensor(shard[row.token, None], cutlass.Int64)
        own = [full(words[vector % shard_packets], "bfloat16") for vector in row.mine]
        mail.open(epoch)
        for i in cutlass.range_constexpr(COUNT):
            slot, packet = row.mine[i] // shard_packets, row.mine[i] % shard_packets
            send(mail.place(targets[i], slot, row.token, packet), own[i])
        row.load_stream()

        arriving = []
        for i in cutlass.range_constexpr(COUNT):
            source = row.mine[i] // shard_packets
            arriving.append((mail.place_from(source, row.token, row.mine[i] % shard_packets), source))
        packets = receive(arriving, limit, failure)
        y = row.post_normed(values_of(packets, 0, COUNT, cutlass.BFloat16), post_eps)
        count_epoch(epochs, counter, epoch)
        row.finish(y, eps)

    @cute.jit
    def host(*arguments) -> None:  # which tensors exist depends on the statics: `split` names them
        exchange, tensors, scalars = arguments[:5], arguments[5:-5], arguments[-5:-1]
        kernel = device(*exchange, boundary.split(tensors), *scalars)
        launch_rows(kernel, arguments[0].shape[0], threads, cluster, arguments[-1])

    return host
