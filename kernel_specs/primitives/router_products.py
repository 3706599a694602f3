"""What the router's GEMMs share: products of a CTA's weight rows with all tokens, and the way of their sums.

Each of eight warps multiplies 32 columns of every slab: weights, in shared memory, are the 16-row operand of the MMA, 8
tokens the other. A lane owns 8 neighbouring columns, which it uses for two k16 steps; both operands see the columns in
that order. FP32 weights are split into three BF16 parts in registers. The warps' sums meet in shared memory, the CTAs'
in the shared memory of the cluster.
"""

import cutlass
from cutlass import cute

from kernel_specs.primitives.bf16_parts import PARTS, Words, load_words, split_pair
from kernel_specs.primitives.fragments import multiply
from kernel_specs.router_gemm.share import ITEM, LANE_COLUMNS, ROWS, TOKENS, WARP, WARPS, Share


def load_tokens(activation: cute.Tensor, tiles: range, column: cutlass.Int32, lane: cutlass.Int32) -> list[Words]:
    """The lane's columns of token lane // 4 of each tile; past the last token it reads that one again."""
    loaded = []
    for tile in tiles:
        token = cutlass.min(tile * TOKENS + lane // 4, activation.shape[0] - 1)
        start = token * activation.shape[1] + column + lane % 4 * LANE_COLUMNS
        loaded.append(load_words(activation.iterator + cute.assume(start, LANE_COLUMNS)))
    return loaded


def multiply_float32(
    share: Share, sums: cute.Tensor, ring: cute.Pointer, at: cutlass.Int32, tokens: list[Words]
) -> None:
    """Two k16 steps of 16 FP32 rows. The smallest parts go first where parts share their sums."""
    for step in range(2):
        low = load_words(ring + cute.assume(at + step * 4, 4))
        high = load_words(ring + cute.assume(at + step * 4 + 8 * share.stride, 4))
        pairs = [split_pair(*pair) for pair in (low[:2], high[:2], low[2:], high[2:])]
        for part in reversed(range(PARTS)):
            rows = tuple(pair[part] for pair in pairs)
            for tile, words in enumerate(tokens):
                first = (min(part, share.chains - 1) * len(tokens) + tile) * ITEM
                multiply(sums, first, rows, words[2 * step], words[2 * step + 1])


def multiply_bfloat16(
    share: Share, sums: cute.Tensor, ring: cute.Pointer, at: cutlass.Int32, tokens: list[Words]
) -> None:
    """Two k16 steps of all row blocks, with sums of their own."""
    for block in range(share.blocks):
        low = load_words(ring + cute.assume(at + block * ROWS * share.stride, LANE_COLUMNS))
        high = load_words(ring + cute.assume(at + (block * ROWS + 8) * share.stride, LANE_COLUMNS))
        for step in range(2):
            rows = (low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1])
            for tile, words in enumerate(tokens):
                first = ((block * share.chains + step) * len(tokens) + tile) * ITEM
                multiply(sums, first, rows, words[2 * step], words[2 * step + 1])


def leave(
    share: Share,
    sums: cute.Tensor,
    partials: cute.Pointer,
    tiles: range,
    warp: cutlass.Int32,
    lane: cutlass.Int32,
) -> None:
    """Put the warp's sums of these tiles where those of all warps meet."""
    for block in range(share.blocks):
        for number, tile in enumerate(tiles):
            item = warp * share.items + (block * share.tiles + tile) * WARP + lane
            total = _add_chains(share, sums, block, number, len(tiles))
            cute.autovec_copy(total, _item(partials, item))


def _add_chains(share: Share, sums: cute.Tensor, block: int, tile: int, tiles: int) -> cute.Tensor:
    total = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
    firsts = [((block * share.chains + chain) * tiles + tile) * ITEM for chain in range(share.chains)]
    for i in range(ITEM):
        value = sums[firsts[-1] + i]
        for first in reversed(firsts[:-1]):
            value = sums[first + i] + value
        total[i] = value
    return total


def send_item(
    share: Share,
    partials: cute.Pointer,
    received: cute.Pointer,
    arrived: cute.Pointer,
    item: cutlass.Int32,
    rank: cutlass.Int32,
) -> None:
    """Add an item up over the warps, and send it to the CTA of the cluster that owns it."""
    total = _add_sources(partials, item, WARPS, share.items)
    words = tuple(total[i].bitcast(cutlass.Int32) for i in range(ITEM))
    target = received + cute.assume((rank * share.owned + item % share.owned) * ITEM, ITEM)
    cute.arch.store_async_dsmem(target, words, arrived, item // share.owned)


def store_item(
    share: Share,
    received: cute.Pointer,
    arrived: cute.Pointer,
    out: cute.Tensor,
    first_row: cutlass.Int32,
    own: cutlass.Int32,
    rank: cutlass.Int32,
) -> None:
    """Add one of the CTA's own items up over the cluster, and store it.

    A CTA ends after its owners' wait, hence not before everything that is sent to it has come.
    """
    cute.arch.mbarrier_wait(arrived, 0)
    total = _add_sources(received, own, share.split, share.owned)
    _store(share, total, out, first_row, rank * share.owned + own)


def _add_sources(partials: cute.Pointer, item: cutlass.Int32, sources: int, stride: int) -> cute.Tensor:
    """The sum of an item over its sources, which are `stride` items apart, in order."""
    total = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
    total.fill(0.0)
    for source in range(sources):
        values = cute.make_rmem_tensor((ITEM,), cutlass.Float32)
        cute.autovec_copy(_item(partials, source * stride + item), values)
        total.store(total.load() + values.load())
    return total


@cute.jit
def _store(
    share: cutlass.Constexpr, total: cute.Tensor, out: cute.Tensor, first_row: cutlass.Int32, item: cutlass.Int32
) -> None:
    """Rows r and r + 8 of two neighbouring tokens, as far as there are such."""
    row = first_row + item // (share.tiles * WARP) * ROWS + item % WARP // 4
    token = item // WARP % share.tiles * TOKENS + item % 4 * 2
    for i in cutlass.range_constexpr(ITEM):
        at, feature = token + i % 2, row + i // 2 * 8
        if at < out.shape[0] and feature < out.shape[1]:
            out[at, feature] = total[i].to(out.element_type)


def _item(items: cute.Pointer, index: cutlass.Int32) -> cute.Tensor:
    return cute.make_tensor(items + cute.assume(index * ITEM, ITEM), cute.make_layout(ITEM))
