"""How the cache comes to shared memory: bulk tensor copies of whole blocks into a ring of tiles, by one warp.

A tensor map with the cache's own strides makes both layouts arrive alike: 16 rows of keys, then 16 of values, each
128 bytes and swizzled.
"""

import cutlass
from cutlass import cute
from cutlass.cute.nvgpu import cpasync

from kernel_specs.primitives.attention_tiling import (
    BLOCK,
    BLOCK_BYTES,
    HEAD,
    LANES,
    Tiling,
    divided,
    tile_count,
)

BOX = (HEAD, BLOCK, 2, 1, 1)  # columns, tokens, keys and values, KV heads, blocks
EVICT_FIRST = 0x12F0000000000000  # L2 policy: a step reads the cache once


def _swizzle() -> cute.Swizzle:
    return cute.make_swizzle(3, 4, 3)


def _block_layout(blocks: int) -> cute.Layout:
    return cute.make_layout((*BOX, blocks), stride=(1, HEAD, HEAD * BLOCK, 0, 0, 2 * HEAD * BLOCK))


def copy_atom(kv_cache: cute.Tensor) -> tuple[cute.CopyAtom, cute.Tensor]:
    """The copy of one block of one KV head, and the tensor of coordinates to copy from."""
    block_stride, head_stride, token_stride, _ = kv_cache.stride
    shape = (HEAD, BLOCK, 2, kv_cache.shape[1], kv_cache.shape[0])
    layout = cute.make_layout(shape, stride=(1, token_stride, HEAD, head_stride, block_stride))
    target = cute.make_composed_layout(_swizzle(), 0, cute.select(_block_layout(1), [0, 1, 2, 3, 4]))
    packed = cute.make_tensor(kv_cache.iterator, layout)
    return tuple(cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), packed, target, BOX))[:2]


def partition(
    tiling: Tiling, atom: cute.CopyAtom, cache: cute.Tensor, ring: cute.Pointer, kv_head: cutlass.Int32
) -> tuple[cute.Tensor, cute.Tensor]:
    """(copy, slot) of the ring and (copy, block) of the cache."""
    tiles = cute.local_tile(cache, BOX, (0, 0, 0, kv_head, None))
    start = cute.recast_ptr(ring, _swizzle(), dtype=cutlass.BFloat16)
    slots = cute.make_tensor(start, _block_layout(tiling.stages * tiling.tile_blocks))
    return cpasync.tma_partition(
        atom, 0, cute.make_layout(1), cute.group_modes(slots, 0, 5), cute.group_modes(tiles, 0, 5)
    )


@cute.jit
def bring_closer(
    tiling: cutlass.Constexpr,
    kv_cache: cute.Tensor,
    table: cute.Tensor,
    first: cutlass.Int32,
    last: cutlass.Int32,
    kv_head: cutlass.Int32,
    warp: cutlass.Int32,
    lane: cutlass.Int32,
) -> None:
    """Bring the ring's first filling to L2, while the launch before may still write the cache.

    L2 is where all multiprocessors see the same bytes: nothing stale can come of it. Each lane touches half a token's
    keys and values; bulk prefetches would stand in the way of the bulk copies.
    """
    count = cutlass.min(last - first, tiling.stages * tiling.tile_blocks) - warp
    ids = table[cutlass.min(first + warp + lane * tiling.consumers, last - 1)]
    for i in cutlass.range(divided(cutlass.max(count, 0) + tiling.consumers - 1, tiling.consumers), unroll=1):
        line = kv_cache[cute.arch.shuffle_sync(ids, i), kv_head, lane >> 1, None]
        address = line.iterator.toint() + (lane & 1) * 128
        cute.arch.inline_ptx("prefetch.global.L2 [{$r0}];", read_only_args=[address])


@cute.jit
def produce(
    tiling: cutlass.Constexpr,
    atom: cute.CopyAtom,
    cache: cute.Tensor,
    ring: cute.Pointer,
    full: cute.Pointer,
    empty: cute.Pointer,
    table: cute.Tensor,
    first: cutlass.Int32,
    last: cutlass.Int32,
    kv_head: cutlass.Int32,
    lane: cutlass.Int32,
) -> None:
    """Fill the ring with tiles of the blocks [first, last) of a table row. Called by one warp."""
    targets, sources = partition(tiling, atom, cache, ring, kv_head)
    # A lane holds one block id of the next 32; they are a step input, like seq_lens.
    ids = table[cutlass.min(first + lane, last - 1)]
    cute.arch.griddepcontrol_wait()
    for tile in cutlass.range(tile_count(tiling, first, last), unroll=1):
        stage = tile % tiling.stages
        at = tile * tiling.tile_blocks & (LANES - 1)
        if tile >= tiling.stages:
            cute.arch.mbarrier_wait(empty + stage, (tile // tiling.stages - 1) % 2)
        start = first + tile * tiling.tile_blocks
        present = cutlass.min(last - start, tiling.tile_blocks)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, present * BLOCK_BYTES)
        for i in cutlass.range_constexpr(tiling.tile_blocks):
            block = cute.arch.shuffle_sync(ids, at + i)
            if i < present:
                cute.copy(
                    atom,
                    sources[None, block],
                    targets[None, stage * tiling.tile_blocks + i],
                    tma_bar_ptr=full + stage,
                    cache_policy=cutlass.Int64(EVICT_FIRST),
                )
        if at + tiling.tile_blocks == LANES:
            ids = table[cutlass.min(start + tiling.tile_blocks + lane, last - 1)]
