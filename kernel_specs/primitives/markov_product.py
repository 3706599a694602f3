"""The product of a vocabulary shard's weight with the requests' embeddings, for `markov_gumbel_sampling`.

Weight rows are the 16-row operand of the MMA and stay in shared memory as far as it has room; requests are columns.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.markov_gumbel_sampling.tiling import LANES, MAX_REQUESTS, PIECE, ROWS, Tiling
from kernel_specs.primitives import mma
from kernel_specs.primitives.grouped_gemm import bulk_copy

ITEM = 4  # sums of a lane: rows r and r + 8, columns c and c + 1


def num_chains(tile: Tiling) -> int:
    """Sums of a row block in turn: products need not wait for each other. Where they wait for L2, two will do."""
    return 4 if tile.warp_blocks == 1 else 2


def is_spread(num_requests: cutlass.Int32) -> cutlass.Boolean:
    """Up to four requests have every other column, so that no lane has two of them to sample for."""
    return num_requests <= MAX_REQUESTS // 2


def requests_of(lane: cutlass.Int32, num_requests: cutlass.Int32) -> list[cutlass.Int32]:
    """The requests of the two columns whose sums the lane holds; MAX_REQUESTS stands for none."""
    spread, pair = is_spread(num_requests), lane % 4
    first = cutlass.Int32(cutlass.select_(spread, pair, pair * 2))
    return [first, cutlass.Int32(cutlass.select_(spread, cutlass.Int32(MAX_REQUESTS), pair * 2 + 1))]


def make_product(tile: Tiling) -> tuple[Callable[..., None], ...]:
    """load_resident, load_embeddings, multiply_resident and multiply_streamed of a CTA's share."""
    vocab_rows, markov_rank, pieces, resident_blocks = (
        tile.vocab_rows,
        tile.markov_rank,
        tile.pieces,
        tile.resident_blocks,
    )
    chains = num_chains(tile)

    @cute.jit
    def load_resident(
        weight: cute.Tensor, shared: cute.Pointer, full: cute.Pointer, first_row: cutlass.Int32, lane: cutlass.Int32
    ) -> None:
        """Start the copies of the warp's rows that stay; `full` counts them in. Rows past the shard are nobody's."""
        rows = cutlass.min(cutlass.max(vocab_rows - first_row, 0), resident_blocks * ROWS)
        if lane == 0:
            cute.arch.mbarrier_init(full, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(full, rows * tile.row_bytes)
        cute.arch.sync_warp()
        for row in cutlass.range(lane, rows, LANES, unroll=1):
            source = weight.iterator + cute.assume(cutlass.Int64(first_row + row) * markov_rank, PIECE)
            bulk_copy(shared + cute.assume(row * tile.pitch, 64), source, tile.row_bytes, full)

    @cute.jit
    def load_embeddings(
        embeddings: cute.Tensor,
        table: cute.Tensor,
        previous: cute.Tensor,
        num_requests: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """The lane's part of the column operand: 16 bytes of every piece of its request's embedding.

        Where requests are spread, every other column repeats the one before, and is nobody's.
        """
        column = lane // 4
        request = cutlass.Int32(cutlass.select_(is_spread(num_requests), column // 2, column))
        if request < num_requests:
            row = cutlass.Int64(previous[request]) * markov_rank + (lane % 4) * 8
            for piece in cutlass.range_constexpr(pieces):
                source = table.iterator + cute.assume(row + piece * PIECE, 8)
                words = cute.make_tensor(cute.recast_ptr(source, dtype=cutlass.Int32), cute.make_layout(4))
                cute.autovec_copy(words, cute.local_tile(embeddings, (4,), (piece,)))

    def columns_of(embeddings: cute.Tensor, piece: int) -> mma.Words:
        return tuple(embeddings[piece * 4 + k] for k in range(4))

    def add_piece(sums: cute.Tensor, piece: int, low: mma.Words, high: mma.Words, embeddings: cute.Tensor) -> None:
        first = piece % (chains // 2) * 2 * ITEM
        mma.mma_two_steps(sums, first, first + ITEM, low, high, columns_of(embeddings, piece))

    def multiply_resident(
        sums: cute.Tensor, shared: cute.Pointer, block: int, embeddings: cute.Tensor, lane: cutlass.Int32
    ) -> None:
        start = (block * ROWS + lane // 4) * tile.pitch + (lane % 4) * 16
        for piece in range(pieces):
            low = mma.load_chunk(shared, start + piece * 64)
            high = mma.load_chunk(shared, start + piece * 64 + 8 * tile.pitch)
            add_piece(sums, piece, low, high, embeddings)

    def multiply_streamed(
        sums: cute.Tensor, weight: cute.Tensor, first_row: cutlass.Int32, embeddings: cute.Tensor, lane: cutlass.Int32
    ) -> None:
        """A row block that shared memory has no room for, from L2. Rows past the shard repeat its last one."""
        starts = []
        for half in range(2):
            row = cutlass.min(first_row + lane // 4 + 8 * half, vocab_rows - 1)
            offset = cute.assume(cutlass.Int64(row) * markov_rank + (lane % 4) * 8, 8)
            starts.append(cute.recast_ptr(weight.iterator + offset, dtype=cutlass.Int32))
        for piece in range(pieces):
            loaded = []
            for half in range(2):
                words = cute.make_rmem_tensor((4,), cutlass.Int32)
                cute.autovec_copy(cute.make_tensor(starts[half] + piece * 16, cute.make_layout(4)), words)
                loaded.append((words[0], words[1], words[2], words[3]))
            add_piece(sums, piece, *loaded, embeddings)

    return load_resident, load_embeddings, multiply_resident, multiply_streamed
