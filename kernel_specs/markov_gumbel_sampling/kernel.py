"""CuTe DSL kernel for `markov_gumbel_sampling`: all steps in one launch, the weight's shard in shared memory.

A CTA owns some rows of the shard, a warp 16 of them or a few times 16: the MMA's row operand; the requests are its 8
columns. A step ends with an exchange over all CTAs: each publishes its best candidate of each request, and each finds
the winner itself. What does not depend on the previous token is done while these words travel: the noise of the next
step, its base logits, and the way of each CTA's candidate's embedding from memory to L2.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.markov_gumbel_sampling.tiling import HEADER, LANES, LAUNCHES, MAX_REQUESTS, ROWS, STUCK, Tiling
from kernel_specs.primitives import candidates, gumbel_noise
from kernel_specs.primitives.candidate_words import TOKEN_BITS
from kernel_specs.primitives.markov_exchange import make_exchange
from kernel_specs.primitives.markov_product import ITEM, make_product, num_chains, requests_of
from kernel_specs.primitives.reduce import pairwise_sum

NUM_TENSORS = 12  # arguments that every specialization begins with
DRAFT_SALT = 1 << 30  # keeps the draft's noise apart from the target's; vLLM's choice


def markov_gumbel_sampling(
    vocab_size: int,
    vocab_rows: int,
    markov_rank: int,
    num_steps: int,
    exchange_words: int,
    world_size: int,
    capped: bool,
    exchanged: bool,
    warps: int,
    warp_blocks: int,
    resident_blocks: int,
) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    tile = Tiling(vocab_rows, markov_rank, warps, warp_blocks, resident_blocks)
    assert exchange_words == tile.exchange_words(num_steps)
    assert vocab_size <= 1 << TOKEN_BITS
    assert exchanged == (world_size > 1)
    num_ctas, chains = tile.num_ctas, num_chains(tile)
    load_resident, load_embeddings, multiply_resident, multiply_streamed = make_product(tile)
    leave_best, publish_best, tell_ranks, find_winners = make_exchange(
        tile, vocab_size, world_size, exchanged=exchanged
    )

    @cute.jit
    def prepare(
        sample_idx_mapping: cute.Tensor,
        sample_pos: cute.Tensor,
        seeds: cute.Tensor,
        temperature: cute.Tensor,
        states: cute.Tensor,
        temperatures: cute.Tensor,
        prefixes: cute.Tensor,
        thread: cutlass.Int32,
    ) -> None:
        """For each step and request: where its logits go, its temperature, and the hash of its seed and position."""
        for at in cutlass.range(thread, sample_pos.shape[0] * num_steps, tile.threads, unroll=1):
            request = at // num_steps
            step = at % num_steps
            state = sample_idx_mapping[request, step]
            seed = cutlass.Int64(0)
            scale = cutlass.Float32(0.0)
            if state >= 0:
                seed = seeds[state]
                scale = temperature[state]
            seed = seed ^ (cutlass.Int64(step) << 32)
            column = step * MAX_REQUESTS + request
            prefixes[column] = gumbel_noise.prefix(seed, sample_pos[request, step] + cutlass.Int64(DRAFT_SALT - 1))
            temperatures[column] = scale
            states[column] = cutlass.Int32(cutlass.select_(state >= 0, cutlass.Int32(state), cutlass.Int32(-1)))

    @cute.jit
    def look_ahead(
        base_logits: cute.Tensor,
        prefixes: cute.Tensor,
        bases: cute.Tensor,
        negated_noise: cute.Tensor,
        step: cutlass.Int32,
        first_row: cutlass.Int32,
        first_token: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Base logits and noise of the lane's tokens in `step`."""
        num_requests = base_logits.shape[0]
        for i in cutlass.range_constexpr(2):
            request = requests_of(lane, num_requests)[i]
            if request < num_requests:
                state = prefixes[step * MAX_REQUESTS + request]
                for k in cutlass.range_constexpr(2 * warp_blocks):
                    row = first_row + k * 8 + lane // 4
                    if row < vocab_rows:
                        bases[k * 2 + i] = base_logits[request, step, row]
                for k in cutlass.range_constexpr(2 * warp_blocks):
                    token = cutlass.Uint32(first_token + first_row + k * 8 + lane // 4)
                    negated_noise[k * 2 + i] = gumbel_noise.negated_gumbel(state, token)

    def transform(base: cutlass.BFloat16, total: cutlass.Float32, scale: cutlass.Float32, cap: cutlass.Float32 | None):
        """The logit of a token, rounded to BF16 as it is cached and sampled from."""
        bias = total.to(cutlass.BFloat16).to(cutlass.Float32)
        logit = (base.to(cutlass.Float32) + bias).to(cutlass.BFloat16).to(cutlass.Float32) * scale
        if capped:
            logit = cap * cute.math.tanh(logit)
        return logit.to(cutlass.BFloat16)

    @cute.jit
    def sample_block(
        best: cute.Tensor,
        sums: cute.Tensor,
        bases: cute.Tensor,
        negated_noise: cute.Tensor,
        draft_logits: cute.Tensor,
        states: cute.Tensor,
        temperatures: cute.Tensor,
        step: cutlass.Int32,
        block: cutlass.Constexpr,
        first_row: cutlass.Int32,
        first_token: cutlass.Int32,
        num_requests: cutlass.Int32,
        scale: cutlass.Float32,
        cap: cutlass.Float32 | None,
        lane: cutlass.Int32,
    ) -> None:
        """Logits of a row block: into the cache, and into the lane's best candidates, two words for each request."""
        for i in cutlass.range_constexpr(2):
            request = requests_of(lane, num_requests)[i]
            if request < num_requests:
                state = states[step * MAX_REQUESTS + request]
                heat = temperatures[step * MAX_REQUESTS + request]
                for half in cutlass.range_constexpr(2):
                    row = first_row + block * ROWS + half * 8 + lane // 4
                    if row < vocab_rows:
                        item = half * 2 + i
                        total = pairwise_sum([sums[chain * ITEM + item] for chain in range(chains)])
                        at = (block * 2 + half) * 2 + i
                        logit = transform(bases[at], total, scale, cap)
                        if cutlass.const_expr(exchanged):
                            draft_logits[request, step, row] = logit
                        elif state >= 0:
                            draft_logits[cutlass.Int64(state), step, first_token + row] = logit
                        value = logit.to(cutlass.Float32)
                        noised = gumbel_noise.divide(value, heat) - negated_noise[at]
                        noised = cutlass.Float32(cutlass.select_(heat == 0.0, value, noised))
                        found = candidates.candidate(noised, first_token + row)
                        best[2 * i], best[2 * i + 1] = candidates.larger(found, (best[2 * i], best[2 * i + 1]))

    @cute.kernel
    def device(
        base_logits: cute.Tensor,
        markov_w1: cute.Tensor,
        markov_w2: cute.Tensor,
        input_ids: cute.Tensor,
        anchor_idx: cute.Tensor,
        sample_idx_mapping: cute.Tensor,
        sample_pos: cute.Tensor,
        seeds: cute.Tensor,
        temperature: cute.Tensor,
        draft_tokens: cute.Tensor,
        draft_logits: cute.Tensor,
        exchange: cute.Tensor,
        winners: cute.Tensor | None,
        peers: cute.Tensor | None,
        first_token: cutlass.Int32,
        rank: cutlass.Int32,
        scale: cutlass.Float32,
        cap: cutlass.Float32 | None,
    ) -> None:
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        lane = thread % LANES
        num_requests = base_logits.shape[0]
        first_row = (cta * warps + warp) * tile.warp_rows

        allocator = cutlass.memory.SmemAllocator()
        weights = allocator.allocate(max(tile.resident_bytes, 16), 128)
        shared = weights + cute.assume(warp * (resident_blocks * ROWS * tile.pitch), 64)
        full = allocator.allocate_array(cutlass.Int64, warps) + warp
        columns = num_steps * MAX_REQUESTS
        states = cute.make_tensor(allocator.allocate_array(cutlass.Int32, columns), cute.make_layout(columns))
        temperatures = cute.make_tensor(allocator.allocate_array(cutlass.Float32, columns), cute.make_layout(columns))
        prefixes = cute.make_tensor(allocator.allocate_array(cutlass.Uint32, columns), cute.make_layout(columns))
        previous = cute.make_tensor(
            allocator.allocate_array(cutlass.Int32, MAX_REQUESTS), cute.make_layout(MAX_REQUESTS)
        )
        board_words = warps * MAX_REQUESTS * 2
        board = cute.make_tensor(
            cute.recast_ptr(allocator.allocate(4 * board_words, 16), dtype=cutlass.Uint32),
            cute.make_layout(board_words),
        )

        if cutlass.const_expr(resident_blocks > 0):
            load_resident(markov_w2, shared, full, first_row, lane)
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        launches = exchange[LAUNCHES]
        epoch = cutlass.Uint32(launches + 1) & cutlass.Uint32(candidates.EPOCH_MASK)
        slots = exchange.iterator + HEADER
        if thread < num_requests:
            previous[thread] = cutlass.min(cutlass.max(input_ids[anchor_idx[thread]], 0), vocab_size - 1)
        prepare(sample_idx_mapping, sample_pos, seeds, temperature, states, temperatures, prefixes, thread)
        cute.arch.sync_threads()

        embeddings = cute.make_rmem_tensor((tile.pieces * 4,), cutlass.Int32)
        embeddings.fill(0)
        sums = cute.make_rmem_tensor((chains * ITEM,), cutlass.Float32)
        bases = cute.make_rmem_tensor((4 * warp_blocks,), cutlass.BFloat16)
        bases.fill(0.0)
        negated_noise = cute.make_rmem_tensor((4 * warp_blocks,), cutlass.Float32)
        negated_noise.fill(0.0)
        best = cute.make_rmem_tensor((4,), cutlass.Uint32)
        patience = cute.make_rmem_tensor((1,), cutlass.Int32)
        patience[0] = candidates.PATIENCE

        load_embeddings(embeddings, markov_w1, previous, num_requests, lane)
        look_ahead(base_logits, prefixes, bases, negated_noise, cutlass.Int32(0), first_row, first_token, lane)
        if cutlass.const_expr(resident_blocks > 0):
            cute.arch.mbarrier_wait(full, 0)

        for step in cutlass.range(num_steps, unroll=1):
            best.fill(0)
            for block in cutlass.range_constexpr(warp_blocks):
                sums.fill(0.0)
                if cutlass.const_expr(block < resident_blocks):
                    multiply_resident(sums, shared, block, embeddings, lane)
                else:
                    multiply_streamed(sums, markov_w2, first_row + block * ROWS, embeddings, lane)
                sample_block(
                    best, sums, bases, negated_noise, draft_logits, states, temperatures, step, block, first_row,
                    first_token, num_requests, scale, cap, lane,
                )  # fmt: skip
            leave_best(best, board, warp, lane)
            cute.arch.sync_threads()
            publish_best(board, slots, markov_w1, epoch, step, num_requests, cta, warp, lane)
            goes_on = step + 1 < num_steps
            if cutlass.const_expr(exchanged):
                tell_ranks(slots, peers, rank, patience, epoch, step, num_requests, cta, warp, lane)
            if goes_on:
                look_ahead(base_logits, prefixes, bases, negated_noise, step + 1, first_row, first_token, lane)
            find_winners(slots, winners, previous, draft_tokens, patience, epoch, step, cta, warp, lane)
            cute.arch.sync_threads()
            if goes_on:
                load_embeddings(embeddings, markov_w1, previous, num_requests, lane)

        if patience[0] == 0 and lane == 0:
            exchange[STUCK] = launches + 1
        # All CTAs have published their last candidates, hence read the number of launches.
        if cta == 0 and thread == 0:
            exchange[LAUNCHES] = launches + 1

    @cute.jit
    def host(*arguments) -> None:  # some exist only when capped, or when exchanged
        *given, cuda_stream = arguments
        tensors, given = given[:NUM_TENSORS], given[NUM_TENSORS:]
        winners, peers, first_token, rank = given[:4] if exchanged else (None, None, given[0], cutlass.Int32(0))
        multiplier, *cap = given[4 if exchanged else 1 :]
        scale = multiplier / cap[0] if capped else multiplier
        device(*tensors, winners, peers, first_token, rank, scale, cap[0] if capped else None).launch(
            grid=(num_ctas, 1, 1),
            block=(tile.threads, 1, 1),
            stream=cuda_stream,
            min_blocks_per_mp=1,
            use_pdl=True,
        )

    return host
