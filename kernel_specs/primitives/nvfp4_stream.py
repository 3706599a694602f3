"""NVFP4 weights of the active experts as streams: each warp fills a ring of row tiles of its own, and multiplies them.

The active experts that are held here are neighbours in the schedule, which lists experts in order. Their row tiles are
cut into as many streams as the grid has, as even as can be; a stream's warps have a range of K each. A warp asks for
its first tiles before it waits for the previous launch, and for the next one whenever it is done with one. The
activations of 8 routes stay unpacked in registers while it goes through an expert's tiles.
"""

from collections.abc import Callable
from typing import NamedTuple

import cutlass
from cutlass import cute

from kernel_specs.primitives.bulk import bulk_copy
from kernel_specs.primitives.nvfp4 import CHAINS, ITEM, TokenOperands, multiply_tile, own_part
from kernel_specs.primitives.nvfp4_tiling import LANES, TOKENS, StreamShape

COUNTED = 256  # entries of the schedule that a warp counts at once


class Place(NamedTuple):
    """Where a stream stands: an entry of the schedule, its expert here, its routes from `start` on, and a tile."""

    entry: cutlass.Int32
    expert: cutlass.Int32
    start: cutlass.Int32
    last: cutlass.Int32
    tile: cutlass.Int32
    first_tile: cutlass.Int32
    end_tile: cutlass.Int32


@cute.jit
def local_entries(
    expert_ids: cute.Tensor, first_expert: cutlass.Int32, num_local: cutlass.Int32, lane: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """The entries of experts held here, from one to before the other; ids behind the last entry are -1."""
    below, within = cutlass.Int32(0), cutlass.Int32(0)
    for first in cutlass.range(0, expert_ids.shape[0], COUNTED, unroll=1):
        for i in cutlass.range_constexpr(COUNTED // LANES):
            at = first + i * LANES + lane
            expert = cutlass.Int32(-1)
            if at < expert_ids.shape[0]:
                expert = expert_ids[at]
            below += cutlass.Int32(expert >= 0 and expert < first_expert)
            within += cutlass.Int32(expert >= first_expert and expert < first_expert + num_local)
    packed = (below << 16) | within
    for offset in (16, 8, 4, 2, 1):
        packed = packed + cute.arch.shuffle_sync_bfly(packed, offset)
    return packed >> 16, (packed >> 16) + (packed & 0xFFFF)


@cute.jit
def at_entry(
    expert_ids: cute.Tensor,
    route_offsets: cute.Tensor,
    entry: cutlass.Int32,
    before: cutlass.Int32,
    begin: cutlass.Int32,
    end: cutlass.Int32,
    tiles: cutlass.Int32 | int,
    first_expert: cutlass.Int32,
) -> Place:
    """The first place of the stream [begin, end) of tiles at an entry; `before` are the tiles before the entry's, which
    has `tiles`.

    Past the last entry it is a place that nobody uses.
    """
    known = cutlass.min(entry, expert_ids.shape[0] - 1)
    first_tile = cutlass.max(begin - before, 0)
    end_tile = cutlass.min(end - before, tiles)
    start, last = route_offsets[known], route_offsets[known + 1]
    return Place(entry, expert_ids[known] - first_expert, start, last, first_tile, first_tile, end_tile)


def make_stream(
    shape: StreamShape,
    expert_code_bytes: int,
    expert_scale_bytes: int,
    load_tokens: Callable[..., TokenOperands],
    deliver: Callable[..., None],
) -> Callable[..., None]:
    """`run`, which every warp calls once.

    load_tokens(context, start, last, k_range, lane) are the lane's operands of the routes from `start` on.
    deliver(context, sums, part, expert, start, last, tile, job, k_range, lane) gets a warp's four sums of each tile in
    turn; `job` counts them, all parts together. `context` is what `run` was given.
    """
    parts, stages, tiles = shape.parts, shape.stages, shape.tiles
    depth = stages // parts

    @cute.jit
    def issue(
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        ring: cute.Pointer,
        full: cute.Pointer,
        place: Place,
        part: int,
        slot: cutlass.Int32,
        k_range: cutlass.Int32,
    ) -> None:
        """Ask for a tile's range."""
        number = cutlass.Int64((place.tile * parts + part) * shape.ranges + k_range)
        code = cutlass.Int64(place.expert) * expert_code_bytes + number * shape.code_bytes
        scale = cutlass.Int64(place.expert) * expert_scale_bytes + number * shape.scale_bytes
        stage = ring + cute.assume(slot * shape.stage_bytes, 64)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + slot, shape.stage_bytes)
            bulk_copy(stage, weight.iterator + code, shape.code_bytes, full + slot)
            bulk_copy(stage + shape.code_bytes, weight_scales.iterator + scale, shape.scale_bytes, full + slot)

    @cute.jit
    def run(
        context: tuple,
        weight: cute.Tensor,
        weight_scales: cute.Tensor,
        expert_ids: cute.Tensor,
        route_offsets: cute.Tensor,
        first_expert: cutlass.Int32,
        ring: cute.Pointer,
        full: cute.Pointer,
        stream: cutlass.Int32,
        k_range: cutlass.Int32,
        lane: cutlass.Int32,
    ) -> None:
        """`ring` and `full` are the warp's own: `stages` stages, and as many mbarriers."""
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(full + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        first_entry, end_entry = local_entries(expert_ids, first_expert, weight.shape[0], lane)
        total = (end_entry - first_entry) * tiles
        begin, end = (cutlass.Int32(number * total // shape.streams) for number in (stream, stream + 1))
        own_entry = first_entry + begin // tiles
        own_end = cutlass.Int32(cutlass.select_(begin < end, first_entry + (end + (tiles - 1)) // tiles, own_entry))
        ahead = at_entry(expert_ids, route_offsets, own_entry, begin // tiles * tiles, begin, end, tiles, first_expert)
        entry, expert, start, last, tile, first_tile, end_tile = ahead
        for job in cutlass.range_constexpr(depth):
            if entry < own_end:
                for part in cutlass.range_constexpr(parts):
                    place = Place(entry, expert, start, last, tile, first_tile, end_tile)
                    issue(weight, weight_scales, ring, full, place, part, cutlass.Int32(job * parts + part), k_range)
            tile += 1
            if tile >= end_tile:
                start += TOKENS
                if start >= last:
                    entry += 1
                    fresh = at_entry(
                        expert_ids, route_offsets, entry, (entry - first_entry) * tiles, begin, end, tiles, first_expert
                    )
                    _, expert, start, last, _, first_tile, end_tile = fresh
                tile = first_tile
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

        job = cutlass.Int32(0)
        for own in cutlass.range(own_entry, own_end, unroll=1):
            here = at_entry(
                expert_ids, route_offsets, own, (own - first_entry) * tiles, begin, end, tiles, first_expert
            )
            for route in cutlass.range(here.start, here.last, TOKENS, unroll=1):
                columns = own_part(load_tokens(context, route, here.last, k_range, lane), shape.groups)
                for own_tile in cutlass.range(here.first_tile, here.end_tile, unroll=1):
                    phase = job // depth % 2
                    for part in cutlass.range_constexpr(parts):
                        slot = job % depth * parts + part
                        cute.arch.mbarrier_wait(full + slot, phase)
                        sums = cute.make_rmem_tensor((CHAINS * ITEM,), cutlass.Float32)
                        sums.fill(0.0)
                        stage = ring + cute.assume(slot * shape.stage_bytes, 64)
                        multiply_tile(sums, stage, shape.code_bytes, columns, lane)
                        # Loads in flight do not hold up what follows: without the fence the next copy overtakes them.
                        cute.arch.fence_proxy("async.shared", space="cta")
                        cute.arch.sync_warp()
                        if entry < own_end:
                            place = Place(entry, expert, start, last, tile, first_tile, end_tile)
                            issue(weight, weight_scales, ring, full, place, part, slot, k_range)
                        for i in cutlass.range_constexpr(ITEM):
                            sums[i] = sums[i] + sums[ITEM + i]
                        deliver(context, sums, part, here.expert, route, here.last, own_tile, job, k_range, lane)
                    tile += 1
                    if tile >= end_tile:
                        start += TOKENS
                        if start >= last:
                            entry += 1
                            fresh = at_entry(
                                expert_ids, route_offsets, entry, (entry - first_entry) * tiles, begin, end, tiles,
                                first_expert,
                            )  # fmt: skip
                            _, expert, start, last, _, first_tile, end_tile = fresh
                        tile = first_tile
                    job += 1

    return run
