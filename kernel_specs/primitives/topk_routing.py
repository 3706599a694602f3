"""Each token's experts and the schedule of all of them, by one cluster of CTAs: what two kernels share.

Each lane sorts its experts' scores once; in each of k rounds the lane with the warp's largest one takes it away.
Choices go to the first CTA, which sets one bit per token for each expert. Bits may be set in any order, so the schedule
that they make does not depend on it.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.expert_schedule import MASK_WORDS, MAX_TOKENS, WARPS, scheduler, shared
from kernel_specs.primitives.transfer import open_transfer
from kernel_specs.primitives.warp_topk import (
    WARP,
    join,
    ordered,
    pick,
    sigmoid,
    sort_descending,
    take_largest,
)

CLUSTER = 8  # so that no SM has more than eight tokens' sigmoids to compute
SMALLEST = 1e-15


def router(num_experts: int, k: int, *, padded: bool) -> tuple[Callable[..., tuple], Callable[..., None]]:
    """`prepare` and `route`, which every CTA of the cluster calls before and behind `griddepcontrol.wait`."""
    owned = -(-num_experts // WARP)  # experts of a lane, neighbours
    assert owned in (1, 2, 4, 8), "lanes sort powers of two"
    assert num_experts % owned == 0
    mark_all, make_schedule = scheduler(num_experts, k)

    def load_owned(row: cute.Tensor, lane: cutlass.Int32) -> list[cutlass.Float32]:
        """The lane's neighbouring elements of a row over experts; past its end, those of the last lane that has any."""
        values = cute.make_rmem_tensor((owned,), cutlass.Float32)
        cute.autovec_copy(cute.local_tile(row, (owned,), (cutlass.min(lane, num_experts // owned - 1),)), values)
        return [values[i] for i in range(owned)]

    @cute.jit
    def remember(chosen: cutlass.Boolean, selected: cute.Tensor, slot: cutlass.Int32, expert: cutlass.Int32) -> None:
        if chosen:
            selected[slot] = expert

    @cute.jit
    def finish(
        topk_ids: cute.Tensor,
        topk_weights: cute.Tensor,
        selected: cute.Tensor,
        scores: cute.Tensor,
        choices: cute.Tensor,
        arrived: cute.Pointer,
        token: cutlass.Int32,
        routed: cutlass.Boolean,
        lane: cutlass.Int32,
    ) -> None:
        """A warp tells the first CTA what its token chose, -1 for a padding token, and writes ids and weights."""
        expert = selected[cutlass.min(lane, k - 1)]
        choice = cutlass.Int32(cutlass.select_(routed, expert, cutlass.Int32(-1)))
        if lane < k:
            cute.arch.store_async_dsmem(choices.iterator + token * k + lane, choice, arrived, 0)
        score = cutlass.Float32(cutlass.select_(lane < k, scores[expert], cutlass.Float32(0.0)))
        total = score
        for offset in (4, 2, 1):
            total = total + cute.arch.shuffle_sync_bfly(total, offset)
        if lane < k:
            topk_ids[token, lane] = choice
            topk_weights[token, lane] = cutlass.select_(routed, score / (total + SMALLEST), cutlass.Float32(0.0))

    @cute.jit
    def is_routed(is_padding: cute.Tensor | None, token: cutlass.Int32) -> cutlass.Boolean:
        routed = token >= 0
        if cutlass.const_expr(padded):
            routed = is_padding[token] == 0
        return routed

    @cute.jit
    def select(
        logits: cute.Tensor,
        bias: list[cutlass.Float32],
        scores: cute.Tensor,
        selected: cute.Tensor,
        token: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        own_scores = [sigmoid(logit) for logit in load_owned(logits[token, None], lane)]
        if lane < num_experts // owned:
            cute.autovec_copy(registers(own_scores), cute.local_tile(scores, (owned,), (lane,)))
        keys = []
        for i in cutlass.range_constexpr(owned):
            key = join(ordered(own_scores[i] + bias[i]), cutlass.Int32(owned - 1 - i))
            keys.append(pick(lane < num_experts // owned, key, cutlass.Uint64(0)))

        def take(slot: int, chosen: cutlass.Boolean, low: cutlass.Int32) -> None:
            remember(chosen, selected, slot, lane * owned + (owned - 1) - low)

        take_largest(sort_descending(keys), k, take)
        cute.arch.sync_warp()

    @cute.jit
    def clear(bits: cute.Tensor, thread: cutlass.Int32) -> None:
        if thread < num_experts:
            for word in cutlass.range_constexpr(MASK_WORDS):
                bits[word * num_experts + thread] = 0

    def prepare(
        bias: cute.Tensor, num_tokens: cutlass.Int32, thread: cutlass.Int32, lane: cutlass.Int32
    ) -> tuple[cute.Tensor, cute.Tensor, cute.Pointer, cute.Tensor, cute.Tensor, list[cutlass.Float32]]:
        """The CTA's shared memory, the cluster's transfer into the first CTA's, and the lane's biases."""
        choices = shared(cutlass.Int32, (MAX_TOKENS * k,))
        bits = shared(cutlass.Int32, (MASK_WORDS * num_experts,))
        arrived = open_transfer(num_tokens * (4 * k))
        cute.arch.cluster_arrive_relaxed()
        clear(bits, thread)
        scores = shared(cutlass.Float32, (WARPS, num_experts))
        selected = shared(cutlass.Int32, (WARPS, k))
        own_bias = load_owned(bias, lane)
        cute.arch.sync_threads()
        cute.arch.cluster_wait()
        return choices, bits, arrived, scores, selected, own_bias

    @cute.jit
    def route(
        prepared: tuple,
        logits: cute.Tensor,
        is_padding: cute.Tensor | None,
        outputs: tuple,
        rank: cutlass.Int32,
        thread: cutlass.Int32,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """`outputs` in the order of `sigmoid_bias_topk_routing`'s spec; `rank` of the CTA in the cluster."""
        choices, bits, arrived, scores, selected, own_bias = prepared
        topk_ids, topk_weights, expert_ids, route_offsets, routes, num_distinct_experts = outputs
        num_tokens = logits.shape[0]
        for token in cutlass.range(rank + CLUSTER * warp, num_tokens, CLUSTER * WARPS, unroll=1):
            routed = is_routed(is_padding, token)
            select(logits, own_bias, scores[warp, None], selected[warp, None], token, lane)
            finish(
                topk_ids, topk_weights, selected[warp, None], scores[warp, None], choices, arrived, token, routed, lane
            )
        if rank == 0:
            cute.arch.mbarrier_wait(arrived, 0)
            mark_all(choices, bits, num_tokens * k, thread)
            cute.arch.sync_threads()
            make_schedule(
                choices, bits, expert_ids, route_offsets, routes, num_distinct_experts, num_tokens, thread, warp, lane
            )

    return prepare, route


def registers(values: list[cutlass.Float32]) -> cute.Tensor:
    made = cute.make_rmem_tensor((len(values),), cutlass.Float32)
    for i, value in enumerate(values):
        made[i] = value
    return made
