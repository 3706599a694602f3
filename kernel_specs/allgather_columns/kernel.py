"""CuTe DSL kernel for `allgather_columns`: a CTA per row and chunk of a shard's columns.

A thread sends one packet of its rank's shard to every rank, and copies the same packet of every rank's shard.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.exchange import Inbox, count_epoch, full, limit_of, load_word, receive, send_if
from kernel_specs.primitives.row_cluster import launch_rows

PACKET = 4  # columns


def allgather_columns(
    full_size: int, shard_size: int, num_chunks: int, world_size: int, threads: int
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert shard_size * world_size == full_size
    shard_packets = shard_size // PACKET
    assert (num_chunks - 1) * threads < shard_packets <= num_chunks * threads

    @cute.kernel
    def device(
        shard: cute.Tensor,
        inbox: cute.Tensor,
        peers: cute.Tensor,
        epochs: cute.Tensor,
        failure: cute.Tensor,
        out: cute.Tensor,
        rank: cutlass.Int32,
        timeout_us: cutlass.Int32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token, chunk = block // num_chunks, block % num_chunks
        mail = Inbox(inbox, peers, rank, world_size, shard.shape[0], shard_packets)
        targets = [mail.address_of(ahead) for ahead in range(world_size)]
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        epoch = load_word(epochs, block)
        limit = limit_of(failure, timeout_us)
        mail.open(epoch)
        position = chunk * threads + thread
        # a row's last chunk may have threads to spare: they look at its last packet and do nothing
        taking_part = position < shard_packets
        packet = cutlass.select_(taking_part, position, shard_packets - 1)
        own = full(cute.recast_tensor(shard[token, None], cutlass.Int64)[packet], "bfloat16")
        for ahead in cutlass.range_constexpr(world_size):
            slot = (ahead + 1) % world_size  # this rank's own inbox last: others wait longer
            send_if(taking_part, mail.place(targets[slot], slot, token, packet), own)

        arriving = [(mail.place_from(source, token, packet), source) for source in range(world_size)]
        packets = receive(arriving, limit, failure, taking_part)
        words = cute.recast_tensor(out[token, None], cutlass.Int64)
        if taking_part:
            for source in cutlass.range_constexpr(world_size):
                words[source * shard_packets + packet] = packets[source]
        cute.arch.sync_threads()
        count_epoch(epochs, block, epoch)

    @cute.jit
    def host(
        shard: cute.Tensor,
        inbox: cute.Tensor,
        peers: cute.Tensor,
        epochs: cute.Tensor,
        failure: cute.Tensor,
        out: cute.Tensor,
        rank: cutlass.Int32,
        timeout_us: cutlass.Int32,
        cuda_stream: object,
    ) -> None:
        kernel = device(shard, inbox, peers, epochs, failure, out, rank, timeout_us)
        launch_rows(kernel, shard.shape[0] * num_chunks, threads, 1, cuda_stream)

    return host
