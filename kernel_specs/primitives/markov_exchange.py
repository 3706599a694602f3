"""How the warps, CTAs and ranks of `markov_gumbel_sampling` find each request's next token.

Warps meet on a board in shared memory, CTAs in slots of global memory, ranks in each other's memory (see `candidates`).
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.markov_gumbel_sampling.tiling import MAX_REQUESTS, Tiling
from kernel_specs.primitives import candidates
from kernel_specs.primitives.markov_product import is_spread

LINE_BYTES = 128


def make_exchange(
    tile: Tiling, vocab_size: int, world_size: int, *, exchanged: bool
) -> tuple[Callable[..., None], ...]:
    """leave_best, publish_best, tell_ranks and find_winners."""
    markov_rank, warps, num_ctas = tile.markov_rank, tile.warps, tile.num_ctas

    def leave_best(best: cute.Tensor, board: cute.Tensor, warp: cutlass.Int32, lane: cutlass.Int32) -> None:
        """The best candidate of the warp for each column onto the CTA's board."""
        for i in range(2):
            found = candidates.largest_of_lanes((best[2 * i], best[2 * i + 1]), (4, 8, 16))
            best[2 * i], best[2 * i + 1] = found
        _store_quad(best, board, warp * (MAX_REQUESTS // 2) + lane % 4, lane < 4)

    @cute.jit
    def publish_best(
        board: cute.Tensor,
        slots: cute.Pointer,
        table: cute.Tensor,
        epoch: cutlass.Uint32,
        step: cutlass.Int32,
        num_requests: cutlass.Int32,
        cta: cutlass.Int32,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Publish the CTA's candidates; requests that do not exist get the epoch too, see `candidates`."""
        for request in cutlass.range(warp, MAX_REQUESTS, warps, unroll=1):
            column = cutlass.Int32(cutlass.select_(is_spread(num_requests), request * 2 % MAX_REQUESTS, request))
            at = (cutlass.min(lane, warps - 1) * MAX_REQUESTS + column) * 2
            found = candidates.largest_of_warp((board[at], board[at + 1]))
            if lane == 0:
                slot = (step * MAX_REQUESTS + request) * num_ctas + cta
                candidates.publish(slots + slot, candidates.word_of(found, epoch), "gpu")
            if request < num_requests and lane < -(-tile.row_bytes // LINE_BYTES):
                start = cutlass.Int64(candidates.token_of(found)) * markov_rank + lane * (LINE_BYTES // 2)
                _prefetch(table.iterator + start)

    @cute.jit
    def tell_ranks(
        slots: cute.Pointer,
        peers: cute.Tensor,
        rank: cutlass.Int32,
        patience: cute.Tensor,
        epoch: cutlass.Uint32,
        step: cutlass.Int32,
        num_requests: cutlass.Int32,
        cta: cutlass.Int32,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Send this rank's winners to all ranks, itself included: to slot `ahead` of the one so many places ahead.

        Each request has a CTA of its own for that, as far as there are enough.
        """
        ahead = cutlass.min(lane, world_size - 1)
        peer = peers[(rank + ahead) % world_size]
        for request in cutlass.range(warp, MAX_REQUESTS, warps, unroll=1):
            if request * num_ctas // MAX_REQUESTS == cta:
                row = step * MAX_REQUESTS + request
                word = cute.make_rmem_tensor((1,), cutlass.Int64)
                word[0] = cutlass.Int64(candidates.word_of((cutlass.Uint32(0), cutlass.Uint32(0)), epoch))
                if request < num_requests:
                    found = candidates.await_largest(slots + row * num_ctas, num_ctas, epoch, patience, lane, "gpu")
                    word[0] = cutlass.Int64(candidates.word_of(found, epoch))
                if lane < world_size:
                    address = peer + cutlass.Int64(row * world_size + ahead) * 8
                    there = cute.make_ptr(cutlass.Int64, address, cute.AddressSpace.gmem, assumed_align=8)
                    candidates.publish(there, word[0], "sys")

    @cute.jit
    def find_winners(
        slots: cute.Pointer,
        winners: cute.Tensor | None,
        previous: cute.Tensor,
        draft_tokens: cute.Tensor,
        patience: cute.Tensor,
        epoch: cutlass.Uint32,
        step: cutlass.Int32,
        cta: cutlass.Int32,
        warp: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """Each request's next token, for this CTA's next step and from the first CTA for the caller."""
        for request in cutlass.range(warp, draft_tokens.shape[0], warps, unroll=1):
            row = step * MAX_REQUESTS + request
            if cutlass.const_expr(exchanged):
                words = winners.iterator + row * world_size
                found = candidates.await_largest(words, world_size, epoch, patience, lane, "sys")
            else:
                found = candidates.await_largest(slots + row * num_ctas, num_ctas, epoch, patience, lane, "gpu")
            token = candidates.token_of(found)
            if lane == 0:
                previous[request] = cutlass.min(token, vocab_size - 1)
                if cta == 0:
                    draft_tokens[request, step] = cutlass.Int64(token)

    return leave_best, publish_best, tell_ranks, find_winners


@cute.jit
def _store_quad(values: cute.Tensor, board: cute.Tensor, at: cutlass.Int32, condition: cutlass.Boolean) -> None:
    if condition:
        cute.autovec_copy(values, cute.local_tile(board, (4,), (at,)))


def _prefetch(pointer: cute.Pointer) -> None:
    cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[pointer.toint()])
