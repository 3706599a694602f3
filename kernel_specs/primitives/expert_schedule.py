"""Which routes each expert gets, from what the tokens chose: a thread per expert, then one per route."""

from collections.abc import Callable

import cutlass
from cutlass import cute

WARP = 32
THREADS = 256
WARPS = THREADS // WARP
MAX_TOKENS = 64
WORD = 32  # tokens per word of an expert's bits
MASK_WORDS = MAX_TOKENS // WORD


def scheduler(num_experts: int, k: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """What sets the bit of each token for each expert that it chose, and what then writes the schedule."""
    route_passes = -(-MAX_TOKENS * k // THREADS)

    def tokens_of(bits: cute.Tensor, expert: cutlass.Int32) -> cutlass.Uint64:
        low = cutlass.Uint64(bits[expert].bitcast(cutlass.Uint32))
        return low | (cutlass.Uint64(bits[expert + num_experts].bitcast(cutlass.Uint32)) << 32)

    def mark(bits: cute.Tensor, token: cutlass.Int32, expert: cutlass.Int32) -> None:
        tokens = bits.iterator + (token // WORD) * num_experts + expert
        bit = cutlass.Int32(1) << (token % WORD)
        cute.arch.red(tokens, bit, op="or", dtype="b32", sem="relaxed", scope="cta")

    @cute.jit
    def mark_all(choices: cute.Tensor, bits: cute.Tensor, num_routes: cutlass.Int32, thread: cutlass.Int32) -> None:
        for step in cutlass.range_constexpr(route_passes):
            route = thread + step * THREADS
            if route < num_routes:
                expert = choices[route]
                if expert >= 0:
                    mark(bits, route // k, expert)

    def sum_below(value: cutlass.Int32, lane: cutlass.Int32) -> cutlass.Int32:
        """The sum of `value` over this lane and those below."""
        for offset in (1, 2, 4, 8, 16):
            lower = cute.arch.shuffle_sync_up(value, offset)
            value = value + cutlass.Int32(cutlass.select_(lane >= offset, lower, cutlass.Int32(0)))
        return value

    @cute.jit
    def make_schedule(
        choices: cute.Tensor,
        bits: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        routes: cute.Tensor,
        num_distinct_experts: cute.Tensor,
        num_tokens: cutlass.Int32,
        thread: cutlass.Int32,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Thread e: where expert e stands among the chosen ones, and where its routes begin.

        `choices` holds the ids of all routes, -1 for none; `bits` one bit per token for each expert, in words of 32
        tokens, `num_experts` apart. All threads of the CTA must see both.
        """
        offsets = shared(cutlass.Int32, (num_experts,))
        totals = shared(cutlass.Int32, (WARPS,))
        count = cutlass.Int32(0)
        if thread < num_experts:
            count = cutlass.Int32(cute.arch.popc(tokens_of(bits, thread)))
        # experts in the upper half, routes in the lower one
        own = (cutlass.Int32(count > 0) << 16) | count
        warp_sum = sum_below(own, lane)
        if lane == WARP - 1:
            totals[warp] = warp_sum
        cute.arch.sync_threads()
        packed, before = cutlass.Int32(0), cutlass.Int32(0)
        for i in cutlass.range_constexpr(WARPS):
            before = cutlass.Int32(cutlass.select_(warp == i, packed, before))
            packed += totals[i]
        num_distinct, num_routed = packed >> 16, packed & 0xFFFF
        before += warp_sum - own
        if count > 0:
            position, first = before >> 16, before & 0xFFFF
            offsets[thread] = first
            expert_ids[position] = thread
            route_offsets[position] = first
        if thread < num_experts and thread >= num_distinct:
            expert_ids[thread] = -1
            route_offsets[thread] = num_routed
        if thread == 0:
            route_offsets[num_experts] = num_routed
            num_distinct_experts[0] = num_distinct
        cute.arch.sync_threads()
        for step in cutlass.range_constexpr(route_passes):
            route = thread + step * THREADS
            if route < num_tokens * k:
                expert = choices[route]
                if expert >= 0:
                    earlier = tokens_of(bits, expert) & ((cutlass.Uint64(1) << cutlass.Uint64(route // k)) - 1)
                    place = offsets[expert] + cutlass.Int32(cute.arch.popc(earlier))
                    routes[place // k, place % k] = route
                if route >= num_routed:
                    routes[route // k, route % k] = -1

    return mark_all, make_schedule


def shared(dtype: type, shape: tuple[int, ...]) -> cute.Tensor:
    """A row-major tensor in shared memory."""
    stride = (1,) if len(shape) == 1 else (shape[1], 1)
    start = cute.arch.alloc_smem(dtype, shape[0] * stride[0], alignment=16)
    return cute.make_tensor(start, cute.make_layout(shape, stride=stride))
