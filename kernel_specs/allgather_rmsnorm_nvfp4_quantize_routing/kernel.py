"""CuTe DSL kernel for `allgather_rmsnorm_nvfp4_quantize_routing`: a CTA per token, beside a cluster that routes.

A CTA sends its row of the shard to every rank, then norms and quantizes what arrives in that row from all of them.
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
    send_if,
    values_of,
)
from kernel_specs.primitives.expert_schedule import THREADS, WARPS, shared
from kernel_specs.primitives.inbox import PACKET_BYTES
from kernel_specs.primitives.nvfp4_codes import reciprocal
from kernel_specs.primitives.nvfp4_rows import quantize_vector
from kernel_specs.primitives.reduce import SLOTS_PER_LANE, WARP, butterfly, pairwise_sum
from kernel_specs.primitives.row_split import VECTOR
from kernel_specs.primitives.topk_routing import CLUSTER, router
from kernel_specs.primitives.vector import dot, load_float32

PACKET = PACKET_BYTES // 2  # columns
COUNT = VECTOR // PACKET  # packets of a vector


def allgather_rmsnorm_nvfp4_quantize_routing(
    hidden_size: int,
    shard_size: int,
    packed_size: int,
    num_blocks: int,
    world_size: int,
    num_experts: int,
    num_experts_per_tok: int,
    num_offsets: int,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    assert shard_size * world_size == hidden_size and shard_size % VECTOR == 0
    assert packed_size * 2 == hidden_size and num_blocks * 16 == hidden_size
    assert num_offsets == num_experts + 1
    prepare, route = router(num_experts, num_experts_per_tok, padded=True)
    shard_packets, row_packets = shard_size // PACKET, hidden_size // PACKET
    vectors = hidden_size // VECTOR
    passes, sends = -(-vectors // THREADS), -(-row_packets // THREADS)
    slots = passes * WARPS
    assert vectors % WARP == 0 and slots & (slots - 1) == 0, "whole warps share a row; butterflies add powers of two"
    all_send, all_norm = row_packets % THREADS == 0, vectors % THREADS == 0

    def sum_over_row(partials: list[cutlass.Float32]) -> cutlass.Float32:
        """As `rmsnorm_nvfp4_quantize` adds the same columns: a warp's 256 neighbours first, then such sums in pairs."""
        sums = shared(cutlass.Float32, (slots,))
        for i, partial in enumerate(partials):
            leave(sums, i, butterfly(partial, WARP))
        cute.arch.sync_threads()
        lanes = slots // SLOTS_PER_LANE
        received = cute.local_tile(sums, (SLOTS_PER_LANE,), (cute.arch.lane_idx() % lanes,)).load()
        return butterfly(pairwise_sum([received[i] for i in range(SLOTS_PER_LANE)]), lanes)

    @cute.jit
    def leave(sums: cute.Tensor, part: cutlass.Constexpr, value: cutlass.Float32) -> None:
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()  # the warp's by a shuffle, in which all lanes take part
        if lane == 0:
            sums[part * WARPS + warp] = value

    @cute.jit
    def store(
        codes: cute.Tensor,
        scales: cute.Tensor,
        word: cutlass.Int32,
        byte: cutlass.Int32,
        token: cutlass.Int32,
        vector: cutlass.Int32,
    ) -> None:
        if vector < vectors:
            cute.recast_tensor(codes[token, None], cutlass.Int32)[vector] = word
            if vector % 2 == 0:
                scales[token, vector // 2] = cutlass.Uint8(byte)

    @cute.jit
    def gather_row(
        exchange: tuple,
        weight: cute.Tensor,
        global_scale: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        rank: cutlass.Int32,
        timeout_us: cutlass.Int32,
        eps: cutlass.Float32,
        token: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        shard, inbox, peers, epochs, failure = exchange
        mail = Inbox(inbox, peers, rank, world_size, shard.shape[0], shard_packets)
        packets_sent = [cutlass.min(thread + i * THREADS, row_packets - 1) for i in range(sends)]
        # this rank's own inbox last: others wait longer
        aheads = [(packet // shard_packets + 1) % world_size for packet in packets_sent]
        targets = [mail.address_of(ahead) for ahead in aheads]
        # a row may have fewer vectors than there are threads: those to spare do as its last one, and store nothing
        mine = [thread + i * THREADS for i in range(passes)]
        read = tuple(cutlass.min(vector, vectors - 1) for vector in mine)
        gain = [load_float32(weight, (vector,), VECTOR) + 1.0 for vector in read]
        scale = global_scale[0]
        inverse_scale = reciprocal(scale)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        epoch = load_word(epochs, token)
        limit = limit_of(failure, timeout_us)
        words = cute.recast_tensor(shard[token, None], cutlass.Int64)
        own = [full(words[packet % shard_packets], "bfloat16") for packet in packets_sent]
        mail.open(epoch)
        for i in cutlass.range_constexpr(sends):
            target = mail.place(targets[i], aheads[i], token, packets_sent[i] % shard_packets)
            if cutlass.const_expr(all_send):
                send(target, own[i])
            else:
                send_if(thread + i * THREADS < row_packets, target, own[i])

        arriving = []
        for vector in read:
            source = vector * VECTOR // shard_size
            first = vector * COUNT - source * shard_packets
            arriving += [(mail.place_from(source, token, first + j), source) for j in range(COUNT)]
        packets = receive(arriving, limit, failure, None if all_norm else mine[passes - 1] < vectors)
        values = [values_of(packets, i, COUNT, cutlass.BFloat16) for i in range(passes)]
        square_sum = sum_over_row([dot(each, each) for each in values])
        count_epoch(epochs, token, epoch)
        inverse = cute.math.rsqrt(square_sum / hidden_size + eps, fastmath=True)
        for i in cutlass.range_constexpr(passes):
            word, byte = quantize_vector(values[i] * inverse * gain[i], scale, inverse_scale)
            store(codes, scales, word, byte, token, mine[i])

    @cute.jit
    def route_all(
        logits: cute.Tensor,
        bias: cute.Tensor,
        is_padding: cute.Tensor,
        outputs: tuple,
        rank: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """Lets the next launch begin when the schedule is there, which it reads before it waits."""
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        prepared = prepare(bias, logits.shape[0], thread, lane)
        cute.arch.griddepcontrol_wait()
        if rank != 0:
            cute.arch.griddepcontrol_launch_dependents()
        route(prepared, logits, is_padding, outputs, rank, thread, warp, lane)
        if rank == 0:
            cute.arch.fence_acq_rel_gpu()
            cute.arch.sync_threads()
            cute.arch.griddepcontrol_launch_dependents()

    @cute.kernel
    def device(
        shard: cute.Tensor,
        inbox: cute.Tensor,
        peers: cute.Tensor,
        epochs: cute.Tensor,
        failure: cute.Tensor,
        weight: cute.Tensor,
        global_scale: cute.Tensor,
        logits: cute.Tensor,
        bias: cute.Tensor,
        is_padding: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        num_distinct_experts: cute.Tensor,
        rank: cutlass.Int32,
        timeout_us: cutlass.Int32,
        eps: cutlass.Float32,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token = block - CLUSTER
        if block < CLUSTER:
            outputs = (topk_ids, topk_weights, expert_ids, route_offsets, routes, num_distinct_experts)
            route_all(logits, bias, is_padding, outputs, block, thread)
        elif token < shard.shape[0]:
            exchange = (shard, inbox, peers, epochs, failure)
            gather_row(exchange, weight, global_scale, codes, scales, rank, timeout_us, eps, token, thread)

    @cute.jit
    def host(
        shard: cute.Tensor,
        inbox: cute.Tensor,
        peers: cute.Tensor,
        epochs: cute.Tensor,
        failure: cute.Tensor,
        weight: cute.Tensor,
        global_scale: cute.Tensor,
        logits: cute.Tensor,
        bias: cute.Tensor,
        is_padding: cute.Tensor,
        codes: cute.Tensor,
        scales: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        num_distinct_experts: cute.Tensor,
        rank: cutlass.Int32,
        timeout_us: cutlass.Int32,
        eps: cutlass.Float32,
        cuda_stream: object,
    ) -> None:
        chosen = (topk_ids, topk_weights, expert_ids, route_offsets, routes, num_distinct_experts)
        device(
            shard, inbox, peers, epochs, failure, weight, global_scale, logits, bias, is_padding, codes, scales,
            *chosen, rank, timeout_us, eps,
        ).launch(
            grid=(CLUSTER + (shard.shape[0] + (CLUSTER - 1)) // CLUSTER * CLUSTER, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(CLUSTER, 1, 1),
            stream=cuda_stream,
            min_blocks_per_mp=1,  # registers are not scarce: loads may all be issued before the first use
            use_pdl=True,
        )  # fmt: skip

    return host
