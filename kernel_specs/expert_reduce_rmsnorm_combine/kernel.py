"""CuTe DSL kernel for `expert_reduce_rmsnorm_combine`: a cluster of CTAs per token.

Each thread has its columns of all rows. All ranks send a token's rows to its owner, whose cluster sums what arrives
rank by rank, norms and combines as expert_combine_rmsnorm does, and sends the result to all. The others run the same
code with nothing to wait for in the first step: they have time, and a cluster stays together.
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
from kernel_specs.primitives.inbox import EPOCH_COLUMNS
from kernel_specs.primitives.route_norms import VECTOR, RouteNorms
from kernel_specs.primitives.row_cluster import RowCluster, launch_rows

MOST_PACKETS = 32  # that a thread waits for at once: more would not fit its registers


def expert_reduce_rmsnorm_combine(
    world_size: int, num_experts_per_tok: int, moe_hidden_size: int, threads: int, cluster: int, rows_dtype: str
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    k = num_experts_per_tok
    element = {"float32": cutlass.Float32, "bfloat16": cutlass.BFloat16}[rows_dtype]
    pieces = VECTOR * element.width // 64  # packets of a thread's columns of a row
    row_packets = moe_hidden_size * element.width // 64
    at_once = max(1, min(world_size, MOST_PACKETS // (k * pieces)))  # ranks whose rows are waited for together
    assert world_size % at_once == 0

    @cute.kernel
    def device(
        rows: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        weight: cute.Tensor,
        row_inbox: cute.Tensor,
        row_peers: cute.Tensor,
        sum_inbox: cute.Tensor,
        sum_peers: cute.Tensor,
        epochs: cute.Tensor,
        failure: cute.Tensor,
        out: cute.Tensor,
        rank: cutlass.Int32,
        timeout_us: cutlass.Int32,
        eps: cutlass.Float32,
    ) -> None:
        here = RowCluster(threads, cluster)
        token = here.token
        owner, place = token % world_size, token // world_size
        is_owner = owner == rank
        norms = RouteNorms(here, k, moe_hidden_size)
        mine = norms.mine
        row_mail = Inbox(row_inbox, row_peers, rank, world_size, row_inbox.shape[2] * k, row_packets)
        sum_mail = Inbox(sum_inbox, sum_peers, rank, world_size, sum_inbox.shape[2], moe_hidden_size // VECTOR)

        norms.load(topk_ids, topk_weights, weight)
        to_owner = owner - rank
        to_owner = cutlass.select_(to_owner < 0, to_owner + world_size, to_owner)
        owner_address = row_mail.address_of(to_owner)
        targets = [sum_mail.address_of(ahead) for ahead in range(world_size)]
        norms.ready()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        counter = token * EPOCH_COLUMNS + here.part
        epoch = load_word(epochs, counter)
        limit = limit_of(failure, timeout_us)
        words = [cute.recast_tensor(rows[token, slot, None], cutlass.Int64) for slot in range(k)]
        sent = [[words[slot][mine * pieces + i] for i in range(pieces)] for slot in range(k)]
        row_mail.open(epoch)
        sum_mail.open(epoch)
        for slot in cutlass.range_constexpr(k):
            for i in cutlass.range_constexpr(pieces):
                # an absent row may hold anything: zeros in its place
                own = cutlass.Int64(cutlass.select_(norms.present[slot], sent[slot][i], cutlass.Int64(0)))
                target = row_mail.place(owner_address, to_owner, place * k + slot, mine * pieces + i)
                send(target, full(own, rows_dtype))
        cute.arch.sync_threads()
        count_epoch(epochs, counter, epoch)

        totals = [None] * k
        for first in cutlass.range_constexpr(0, world_size, at_once):
            arriving = [
                (row_mail.place_from(first + source, place * k + slot, mine * pieces + i), first + source)
                for source in range(at_once)
                for slot in range(k)
                for i in range(pieces)
            ]
            packets = receive(arriving, limit, failure, is_owner)
            for source in cutlass.range_constexpr(at_once):
                for slot in cutlass.range_constexpr(k):
                    values = values_of(packets, source * k + slot, pieces, element)
                    totals[slot] = values if totals[slot] is None else totals[slot] + values
        combined = norms.combine(totals, eps)

        rounded = cute.make_rmem_tensor((VECTOR,), cutlass.BFloat16)
        rounded.store(combined.to(cutlass.BFloat16))
        result = full(cute.recast_tensor(rounded, cutlass.Int64)[0], "bfloat16")
        for ahead in cutlass.range_constexpr(1, world_size):
            send_if(is_owner, sum_mail.place(targets[ahead], ahead, place, mine), result)
        # An owner that waits in vain ends first, and sends NaN: so it is the silent rank that gets named.
        received = receive([(sum_mail.place_from(owner, place, mine), owner)], 2 * limit, failure, owner != rank)
        cute.recast_tensor(out[token, None], cutlass.Int64)[mine] = cutlass.select_(is_owner, result, received[0])

    @cute.jit
    def host(
        rows: cute.Tensor,
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        weight: cute.Tensor,
        row_inbox: cute.Tensor,
        row_peers: cute.Tensor,
        sum_inbox: cute.Tensor,
        sum_peers: cute.Tensor,
        epochs: cute.Tensor,
        failure: cute.Tensor,
        out: cute.Tensor,
        rank: cutlass.Int32,
        timeout_us: cutlass.Int32,
        eps: cutlass.Float32,
        cuda_stream: object,
    ) -> None:
        inboxes = (row_inbox, row_peers, sum_inbox, sum_peers, epochs, failure)
        kernel = device(rows, topk_ids, topk_weights, weight, *inboxes, out, rank, timeout_us, eps)
        launch_rows(kernel, out.shape[0], threads, cluster, cuda_stream)

    return host
