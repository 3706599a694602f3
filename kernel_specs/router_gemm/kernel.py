"""CuTe DSL kernel for `router_gemm`: 16 experts and a part of K per CTA, the whole of it in flight at once.

The warps ask for all of the CTA's weights with bulk copies, a stage of 256 columns after the other. Each of eight warps
multiplies 32 columns of every stage: weights are the 16-row operand of the MMA, split into three BF16 parts in
registers, 8 tokens the other. A lane owns 8 neighbouring columns, which it uses for two k16 steps; both operands see
the columns in that order. The warps' sums meet in shared memory, the CTAs' in the shared memory of the cluster.
"""

from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives.bf16_parts import PARTS, Words, load_words, split_pair
from kernel_specs.primitives.bulk import bulk_copy
from kernel_specs.primitives.fragments import multiply
from kernel_specs.primitives.transfer import open_transfer

WARP = 32
WARPS = 8
THREADS = WARP * WARPS
ROWS = 16
TOKENS = 8  # of an MMA
LANE_COLUMNS = 8
BLOCK = 32  # columns of a warp's part of a stage
STAGE = BLOCK * WARPS
ITEM = 4  # sums of a lane in an MMA
PAD = 4  # FP32 behind a row: the eight lanes that read together then touch different banks


def router_gemm(num_experts: int, hidden_size: int, max_tokens: int, split: int) -> Callable[..., None]:
    """The host function of one specialization; its arguments are the specialization's, then the stream."""
    columns = hidden_size // split  # of a CTA
    stages = columns // STAGE
    assert stages * STAGE * split == hidden_size
    tiles = -(-max_tokens // TOKENS)
    pass_tiles = min(tiles, 4)  # with more tokens the registers would not suffice for two CTAs per SM
    passes = tiles // pass_tiles
    # The tensor cores cut off what a sum cannot hold, so small parts are added to sums of their own; with few tokens
    # the parts' MMAs then need not wait for each other either.
    chains = PARTS if tiles <= 2 else 2
    row_stride = columns + PAD
    items = tiles * WARP  # of a CTA
    owned = items // split
    assert owned * split == items

    @cute.jit
    def open_stages(full: cute.Pointer, rows: cutlass.Int32, thread: cutlass.Int32) -> None:
        """One mbarrier per stage, which completes when `rows` rows of it have arrived."""
        if thread == 0:
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + stage, 1)
            cute.arch.mbarrier_init_fence()
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_arrive_and_expect_tx(full + stage, rows * (STAGE * 4))

    @cute.jit
    def request(
        weight: cute.Tensor,
        ring: cute.Pointer,
        full: cute.Pointer,
        first_row: cutlass.Int32,
        rank: cutlass.Int32,
        warp: cutlass.Int32,
    ) -> None:
        """Every warp asks for its rows' parts of all stages; rows past the last expert are left as they are."""
        for stage in cutlass.range_constexpr(stages):
            for i in cutlass.range_constexpr(ROWS // WARPS):
                row = warp * (ROWS // WARPS) + i
                column = rank * columns + stage * STAGE
                if first_row + row < num_experts:
                    source = weight.iterator + cute.assume((first_row + row) * hidden_size + column, STAGE)
                    with cute.arch.elect_one():
                        bulk_copy(ring + row * row_stride + stage * STAGE, source, STAGE * 4, full + stage)

    def load_tokens(
        activation: cute.Tensor, first_tile: int, column: cutlass.Int32, lane: cutlass.Int32
    ) -> list[Words]:
        """The lane's columns of token lane // 4 of each tile; past the last token it reads that one again."""
        loaded = []
        for tile in range(first_tile, first_tile + pass_tiles):
            token = cutlass.min(tile * TOKENS + lane // 4, activation.shape[0] - 1)
            start = token * hidden_size + column + lane % 4 * LANE_COLUMNS
            loaded.append(load_words(activation.iterator + cute.assume(start, LANE_COLUMNS)))
        return loaded

    def multiply_block(
        sums: cute.Tensor,
        ring: cute.Pointer,
        column: int,
        tokens: list[Words],
        lane: cutlass.Int32,
        warp: cutlass.Int32,
    ) -> None:
        """Two k16 steps. The smallest parts go first where all parts share their sums."""
        at = lane // 4 * row_stride + column + warp * BLOCK + lane % 4 * LANE_COLUMNS
        for step in range(2):
            low = load_words(ring + cute.assume(at + step * 4, 4))
            high = load_words(ring + cute.assume(at + step * 4 + 8 * row_stride, 4))
            pairs = [split_pair(*pair) for pair in (low[:2], high[:2], low[2:], high[2:])]
            for part in reversed(range(PARTS)):
                rows = tuple(pair[part] for pair in pairs)
                for tile in range(pass_tiles):
                    first = (min(part, chains - 1) * pass_tiles + tile) * ITEM
                    multiply(sums, first, rows, tokens[tile][2 * step], tokens[tile][2 * step + 1])

    def add_chains(sums: cute.Tensor, tile: int) -> cute.Tensor:
        total = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
        for i in range(ITEM):
            value = sums[((chains - 1) * pass_tiles + tile) * ITEM + i]
            for chain in reversed(range(chains - 1)):
                value = sums[(chain * pass_tiles + tile) * ITEM + i] + value
            total[i] = value
        return total

    def add_sources(partials: cute.Pointer, item: cutlass.Int32, sources: int, stride: int) -> cute.Tensor:
        """The sum of an item over its sources, which are `stride` items apart, in order."""
        total = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
        total.fill(0.0)
        for source in range(sources):
            values = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
            start = partials + cute.assume((source * stride + item) * ITEM, ITEM)
            cute.autovec_copy(cute.make_tensor(start, cute.make_layout(ITEM)), values)
            total.store(total.load() + values.load())
        return total

    @cute.jit
    def store(total: cute.Tensor, logits: cute.Tensor, first_row: cutlass.Int32, item: cutlass.Int32) -> None:
        row = first_row + item % WARP // 4
        token = item // WARP * TOKENS + item % 4 * 2
        for i in cutlass.range_constexpr(ITEM):
            at, expert = token + i % 2, row + i // 2 * 8
            if at < logits.shape[0] and expert < num_experts:
                logits[at, expert] = total[i]

    def leave(
        sums: cute.Tensor, partials: cute.Pointer, first_tile: int, warp: cutlass.Int32, lane: cutlass.Int32
    ) -> None:
        """Put the warp's sums of a pass where those of all warps meet."""
        for tile in range(pass_tiles):
            at = cute.assume((warp * items + (first_tile + tile) * WARP + lane) * ITEM, ITEM)
            cute.autovec_copy(add_chains(sums, tile), cute.make_tensor(partials + at, cute.make_layout(ITEM)))

    @cute.jit
    def reduce(
        partials: cute.Pointer,
        received: cute.Pointer,
        arrived: cute.Pointer,
        logits: cute.Tensor,
        first_row: cutlass.Int32,
        rank: cutlass.Int32,
        thread: cutlass.Int32,
    ) -> None:
        """Over the warps, then over the cluster, whose CTAs own a part of the items each.

        A CTA ends after its owners' wait, hence not before everything that is sent to it has come.
        """
        if thread < items:
            total = add_sources(partials, thread, WARPS, items)
            words = tuple(total[i].bitcast(cutlass.Int32) for i in range(ITEM))
            target = received + cute.assume((rank * owned + thread % owned) * ITEM, ITEM)
            cute.arch.store_async_dsmem(target, words, arrived, thread // owned)
        if thread < owned:
            cute.arch.mbarrier_wait(arrived, 0)
            store(add_sources(received, thread, split, owned), logits, first_row, rank * owned + thread)

    @cute.kernel
    def device(activation: cute.Tensor, weight: cute.Tensor, logits: cute.Tensor) -> None:
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        first_row, rank = block // split * ROWS, block % split
        ring = cute.arch.alloc_smem(cutlass.Float32, ROWS * row_stride, alignment=128)
        partials = cute.arch.alloc_smem(cutlass.Float32, WARPS * items * ITEM, alignment=128)
        received = cute.arch.alloc_smem(cutlass.Float32, split * owned * ITEM, alignment=128)
        full = cute.arch.alloc_smem(cutlass.Int64, stages, alignment=8)
        open_stages(full, cutlass.min(ROWS, num_experts - first_row), thread)
        arrived = open_transfer(split * owned * ITEM * 4)
        cute.arch.cluster_arrive_relaxed()
        cute.arch.sync_threads()
        # The weight does not depend on the previous launch: all of it is asked for before the wait.
        request(weight, ring, full, first_row, rank, warp)
        cute.arch.cluster_wait()
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        first_column = rank * columns + warp * BLOCK
        steps = [(part * pass_tiles, stage) for part in range(passes) for stage in range(stages)]
        ahead = stages if tiles <= 2 else 2  # steps whose activations are on their way
        coming = [load_tokens(activation, tile, first_column + stage * STAGE, lane) for tile, stage in steps[:ahead]]
        sums = cute.make_rmem_tensor((chains * pass_tiles * ITEM,), cutlass.Float32)
        for number in cutlass.range_constexpr(len(steps)):
            tile, stage = steps[number]
            if cutlass.const_expr(stage == 0):
                sums.fill(0.0)
            cute.arch.mbarrier_wait(full + stage, 0)
            multiply_block(sums, ring, stage * STAGE, coming[number], lane, warp)
            if cutlass.const_expr(number + ahead < len(steps)):
                later_tile, later_stage = steps[number + ahead]
                coming.append(load_tokens(activation, later_tile, first_column + later_stage * STAGE, lane))
            if cutlass.const_expr(stage == stages - 1):
                leave(sums, partials, tile, warp, lane)
        cute.arch.sync_threads()
        reduce(partials, received, arrived, logits, first_row, rank, thread)

    @cute.jit
    def host(activation: cute.Tensor, weight: cute.Tensor, logits: cute.Tensor, cuda_stream: object) -> None:
        device(activation, weight, logits).launch(
            grid=(-(-num_experts // ROWS) * split, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(split, 1, 1),
            stream=cuda_stream,
            use_pdl=True,
        )

    return host
