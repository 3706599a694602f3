"""Where a CTA's results meet and leave it: the key groups' in shared memory, in order, then the split's to memory."""

import cutlass
from cutlass import cute

from kernel_specs.primitives.attention_tiling import COLUMN_TILES, LANES, Tiling, packed_row, query_and_head
from kernel_specs.primitives.online_softmax import exp2, finite_or_zero


def _item(ring: cute.Pointer, first: cutlass.Int32, index: int, lane: cutlass.Int32) -> cute.Tensor:
    """Four values; neighbouring lanes' lie side by side."""
    start = cute.recast_ptr(ring + cute.assume((first + index * LANES + lane) * 16, 16), dtype=cutlass.Float32)
    return cute.make_tensor(start, cute.make_layout(4))


def _first_item(tiling: Tiling, key_group: cutlass.Int32 | int, row_warp: cutlass.Int32) -> cutlass.Int32:
    return ((key_group - 1) * tiling.row_warps + row_warp) * tiling.exchange_items * LANES


@cute.jit
def merge_groups(
    tiling: cutlass.Constexpr,
    maxima: cute.Tensor,
    sums: cute.Tensor,
    outputs: cute.Tensor,
    ring: cute.Pointer,
    scale: cutlass.Float32,
    row_warp: cutlass.Int32,
    key_group: cutlass.Int32,
    lane: cutlass.Int32,
) -> None:
    """Leave the sums over all key groups with group 0; the others' go through the ring, which nobody reads now."""
    cute.arch.barrier(barrier_id=1, number_of_threads=tiling.consumers * LANES)
    if key_group > 0:
        first = _first_item(tiling, key_group, row_warp)
        for i in cutlass.range_constexpr(tiling.quads):
            cute.autovec_copy(cute.local_tile(outputs, (4,), (i,)), _item(ring, first, i, lane))
        for i in cutlass.range_constexpr(tiling.warp_tiles):
            state = cute.make_rmem_tensor((4,), cutlass.Float32)
            for k in cutlass.range_constexpr(2):
                state[k] = maxima[2 * i + k]
                state[2 + k] = sums[2 * i + k]
            cute.autovec_copy(state, _item(ring, first, tiling.quads + i, lane))
    cute.arch.barrier(barrier_id=1, number_of_threads=tiling.consumers * LANES)
    if key_group == 0:
        for other in cutlass.range_constexpr(1, tiling.key_groups):
            _merge(tiling, maxima, sums, outputs, ring, _first_item(tiling, other, row_warp), scale, lane)


def _merge(
    tiling: Tiling,
    maxima: cute.Tensor,
    sums: cute.Tensor,
    outputs: cute.Tensor,
    ring: cute.Pointer,
    first: cutlass.Int32,
    scale: cutlass.Float32,
    lane: cutlass.Int32,
) -> None:
    """Add one other group's results, both brought to the larger maximum."""
    for i in range(tiling.warp_tiles):
        state = _item(ring, first, tiling.quads + i, lane).load()
        factors = []
        for k in range(2):
            slot = 2 * i + k
            largest = cute.arch.fmax(maxima[slot], state[k])
            base = finite_or_zero(largest) * scale
            factors.append((exp2(maxima[slot] * scale - base), exp2(state[k] * scale - base)))
            maxima[slot] = largest
            sums[slot] = sums[slot] * factors[k][0] + state[2 + k] * factors[k][1]
        for tile in range(COLUMN_TILES):
            theirs = _item(ring, first, i * COLUMN_TILES + tile, lane).load()
            for k in range(4):
                at = (i * COLUMN_TILES + tile) * 4 + k
                outputs[at] = outputs[at] * factors[k // 2][0] + theirs[k] * factors[k // 2][1]


@cute.jit
def store(
    tiling: cutlass.Constexpr,
    maxima: cute.Tensor,
    sums: cute.Tensor,
    outputs: cute.Tensor,
    partial_max: cute.Tensor,
    partial_sum: cute.Tensor,
    partial_out: cute.Tensor,
    scale: cutlass.Float32,
    split: cutlass.Int32,
    kv_head: cutlass.Int32,
    request: cutlass.Int32,
    row_warp: cutlass.Int32,
    lane: cutlass.Int32,
) -> None:
    """Write the warp's rows of this split; surplus rows are nobody's."""
    for slot in cutlass.range_constexpr(tiling.slots):
        row = packed_row(tiling, row_warp, lane, slot)
        if row < tiling.rows:
            query, head = query_and_head(tiling, row)
            token = request * tiling.query_length + query
            head += kv_head * tiling.group
            if lane & 3 == 0:
                partial_max[token, head, split] = maxima[slot] * scale
                partial_sum[token, head, split] = sums[slot]
            target = partial_out[token, head, split, None]
            places = tiling.output_places(slot)
            for tile in cutlass.range_constexpr(COLUMN_TILES):
                pair = cute.make_rmem_tensor((2,), cutlass.Float32)
                for k in cutlass.range_constexpr(2):
                    pair[k] = outputs[places[2 * tile + k]]
                cute.autovec_copy(pair, cute.local_tile(target, (2,), (tile * 4 + (lane & 3),)))
