"""What a consumer warp does with a tile of keys: scores, masks, weights relative to the largest score, sums of values.

A warp keeps the maxima, sums and outputs of its rows in registers. When a maximum grows, what was summed is rescaled.
"""

import operator
from collections.abc import Callable

import cutlass
from cutlass import cute

from kernel_specs.primitives import fragments
from kernel_specs.primitives.attention_tiling import (
    BLOCK,
    BLOCK_BYTES,
    COLUMN_TILES,
    HEAD,
    KEY_BYTES,
    ROW_BYTES,
    STEPS,
    Tiling,
    packed_row,
    query_and_head,
    tile_count,
)

NOTHING = -cutlass.Float32.inf  # the score of a key that a row does not see


def exp2(value: cutlass.Float32) -> cutlass.Float32:
    return cute.math.exp2(value, fastmath=True)


def finite_or_zero(value: cutlass.Float32) -> cutlass.Float32:
    """What exponents are relative to: 0 where no key was seen, as -inf - -inf is NaN."""
    return cutlass.select_(value == NOTHING, cutlass.Float32(0.0), value)


def over_quad(combine: Callable[..., cutlass.Float32], value: cutlass.Float32) -> cutlass.Float32:
    """Combined over the four lanes that share a row."""
    for offset in (1, 2):
        value = combine(value, cute.arch.shuffle_sync_bfly(value, offset))
    return value


def in_pairs(combine: Callable[..., cutlass.Float32], values: list[cutlass.Float32]) -> cutlass.Float32:
    """All values (a power of two of them) combined in a tree: a chain would wait for each step."""
    while len(values) > 1:
        values = [combine(left, right) for left, right in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def load_queries(
    tiling: Tiling,
    qkvg: cute.Tensor,
    request: cutlass.Int32,
    kv_head: cutlass.Int32,
    row_warp: cutlass.Int32,
    lane: cutlass.Int32,
) -> cute.Tensor:
    """Row fragments of the warp's queries: a lane's 4 words per tile and k16 step. Surplus rows repeat the last."""
    width = qkvg.shape[1] // 2
    start = cute.recast_ptr(qkvg.iterator, dtype=cutlass.Int32)
    words = cute.make_tensor(start, cute.make_layout((qkvg.shape[0], width), stride=(width, 1)))
    queries = cute.make_rmem_tensor((tiling.warp_tiles * STEPS * 4,), cutlass.Int32)
    for slot in range(tiling.slots):
        query, head = query_and_head(tiling, cutlass.min(packed_row(tiling, row_warp, lane, slot), tiling.rows - 1))
        column = (kv_head * tiling.group + head) * (HEAD // 2) + (lane & 3)
        for step, half in [(s, h) for s in range(STEPS) for h in range(2)]:
            at = (slot // 2 * STEPS + step) * 4 + half * 2 + slot % 2
            queries[at] = words[request * tiling.query_length + query, column + step * 8 + half * 4]
    return queries


def _score(
    tiling: Tiling, scores: cute.Tensor, queries: cute.Tensor, keys: cutlass.Int32, offset: cutlass.Int32
) -> None:
    """Scores of the warp's rows and one tile: a lane's 4 values per row tile and 8 keys."""
    scores.fill(0.0)
    for block, step in [(b, s) for b in range(tiling.tile_blocks) for s in range(STEPS)]:
        words = fragments.load(keys + block * BLOCK_BYTES + (offset ^ (32 * step)), transposed=False)
        for i, half in [(i, h) for i in range(tiling.warp_tiles) for h in range(2)]:
            row_words = tuple(queries[(i * STEPS + step) * 4 + k] for k in range(4))
            first = ((i * tiling.tile_blocks + block) * 2 + half) * 4
            fragments.multiply(scores, first, row_words, words[2 * half], words[2 * half + 1])


def _hide(tiling: Tiling, scores: cute.Tensor, limits: list[cutlass.Int32], *, newer: bool) -> None:
    """Score -inf for the keys of a tile that are `newer` than a row's limit, or not newer than it."""
    for slot in range(tiling.slots):
        for at, place in enumerate(tiling.score_places(slot)):
            key = at // 2 * 8 + at % 2
            hidden = key > limits[slot] if newer else key <= limits[slot]
            scores[place] = cutlass.select_(hidden, NOTHING, scores[place])


@cute.jit
def _clear_values(values: cutlass.Int32, begin: cutlass.Int32, end: cutlass.Int32, lane: cutlass.Int32) -> None:
    """Zero the rows [begin, end) of a tile's values: 0 * NaN would be NaN. Every warp writes all the zeros it needs."""
    for row in cutlass.range(begin + (lane >> 3), end, 4, unroll=1):
        address = values + (row >> 4) * BLOCK_BYTES + (row & (BLOCK - 1)) * ROW_BYTES + (lane & 7) * 16
        zeros = [cutlass.Int32(0)] * 4
        cute.arch.inline_ptx(
            "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *zeros]
        )
    # The copy that refills this stage must not be overtaken by these stores.
    cute.arch.fence_proxy("async.shared", space="cta")
    cute.arch.sync_warp()


def _weigh(
    tiling: Tiling,
    scores: cute.Tensor,
    maxima: cute.Tensor,
    sums: cute.Tensor,
    outputs: cute.Tensor,
    scale: cutlass.Float32,
) -> None:
    """Turn scores into weights 2^(scale * (score - maximum)); bring what was summed so far to the new maximum."""
    for slot in range(tiling.slots):
        places = tiling.score_places(slot)
        largest = over_quad(cute.arch.fmax, in_pairs(cute.arch.fmax, [scores[at] for at in places]))
        largest = cute.arch.fmax(maxima[slot], largest)
        base = finite_or_zero(largest) * scale
        factor = exp2(maxima[slot] * scale - base)
        maxima[slot] = largest
        for at in places:
            scores[at] = exp2(scores[at] * scale - base)
        sums[slot] = sums[slot] * factor + in_pairs(operator.add, [scores[at] for at in places])
        for at in tiling.output_places(slot):
            outputs[at] = outputs[at] * factor


def _add_values(
    tiling: Tiling, outputs: cute.Tensor, scores: cute.Tensor, values: cutlass.Int32, offset: cutlass.Int32
) -> None:
    """Add the products of the weights, rounded to BF16, with the tile's values."""
    for block in range(tiling.tile_blocks):
        weights = []
        for i in range(tiling.warp_tiles):
            first = (i * tiling.tile_blocks + block) * 8
            weights.append(tuple(fragments.pack(scores[first + k], scores[first + k + 1]) for k in (0, 2, 4, 6)))
        for pair in range(COLUMN_TILES // 2):
            words = fragments.load(values + block * BLOCK_BYTES + (offset ^ (32 * pair)), transposed=True)
            for i, half in [(i, h) for i in range(tiling.warp_tiles) for h in range(2)]:
                first = (i * COLUMN_TILES + pair * 2 + half) * 4
                fragments.multiply(outputs, first, weights[i], words[2 * half], words[2 * half + 1])


@cute.jit
def consume(
    tiling: cutlass.Constexpr,
    queries: cute.Tensor,
    maxima: cute.Tensor,
    sums: cute.Tensor,
    outputs: cute.Tensor,
    ring: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    seq_len: cutlass.Int32,
    first: cutlass.Int32,
    last: cutlass.Int32,
    scale: cutlass.Float32,
    row_warp: cutlass.Int32,
    key_group: cutlass.Int32,
    lane: cutlass.Int32,
) -> None:
    """Attend to this key group's tiles of the blocks [first, last)."""
    oldest = seq_len - tiling.query_length  # the first query's own key
    limits = cute.make_rmem_tensor((tiling.slots,), cutlass.Int32)
    for slot in cutlass.range_constexpr(tiling.slots):
        row = cutlass.min(packed_row(tiling, row_warp, lane, slot), tiling.rows - 1)
        limits[slot] = oldest + query_and_head(tiling, row)[0]
    end = cutlass.min(seq_len, last * BLOCK)  # keys from here on are not copied, or nobody's
    begin = oldest - tiling.sliding_window + 1  # with a window, keys before this are nobody's
    key_offset = fragments.rows_offset(lane)
    value_offset = fragments.transposed_offset(lane)
    scores = cute.make_rmem_tensor((tiling.warp_tiles * tiling.tile_blocks * 8,), cutlass.Float32)
    for tile in cutlass.range(key_group, tile_count(tiling, first, last), tiling.key_groups, unroll=1):
        stage = tile % tiling.stages
        address = ring.toint() + stage * tiling.tile_bytes
        tile_start = (first + tile * tiling.tile_blocks) * BLOCK
        cute.arch.mbarrier_wait(full + stage, (tile // tiling.stages) % 2)
        _score(tiling, scores, queries, address, key_offset)
        column = tile_start + (lane & 3) * 2
        if tile_start + tiling.tile_keys > cutlass.min(end, oldest + 1):
            _hide(tiling, scores, [cutlass.min(limits[i], end - 1) - column for i in range(tiling.slots)], newer=True)
            _clear_values(address + KEY_BYTES, cutlass.max(end - tile_start, 0), tiling.tile_keys, lane)
        if cutlass.const_expr(tiling.sliding_window > 0):
            if tile_start < seq_len - tiling.sliding_window:
                window_limits = [limits[i] - tiling.sliding_window - column for i in range(tiling.slots)]
                _hide(tiling, scores, window_limits, newer=False)
                _clear_values(address + KEY_BYTES, cutlass.Int32(0), begin - tile_start, lane)
        _weigh(tiling, scores, maxima, sums, outputs, scale)
        _add_values(tiling, outputs, scores, address + KEY_BYTES, value_offset)
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive(empty + stage)
