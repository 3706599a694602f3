"""How one CTA of `paged_gqa_verify_attention` divides its rows and keys; plain numbers, known when it is compiled."""

from dataclasses import dataclass

import cutlass

HEAD = 64
BLOCK = 16  # tokens of a cache block: the K of a product with values
ROWS = 16  # of an MMA
LANES = 32
ROW_BYTES = 128  # of a key or value
KEY_BYTES = BLOCK * ROW_BYTES  # a block's keys, then as many bytes of values
BLOCK_BYTES = 2 * KEY_BYTES
COLUMN_TILES = HEAD // 8  # tiles of 8 output columns
STEPS = HEAD // 16  # k16 steps of a score


@dataclass(frozen=True, slots=True)
class Tiling:
    """A packed row is query * group + head, so that the queries of a KV head's group share its keys."""

    query_length: int
    group: int  # query heads of a KV head
    sliding_window: int
    tile_blocks: int
    stages: int
    warp_tiles: int
    key_groups: int

    def __post_init__(self) -> None:
        assert LANES % self.tile_blocks == 0, "a lane per block id, and whole tiles of them"
        assert (
            self.key_groups - 1
        ) * self.row_warps * self.exchange_items * LANES * 16 <= self.stages * self.tile_bytes
        assert self.stages * self.tile_blocks <= LANES * self.consumers, "a lane per block to prefetch"

    @property
    def rows(self) -> int:
        return self.query_length * self.group

    @property
    def row_warps(self) -> int:
        return -(-self.rows // (ROWS * self.warp_tiles))

    @property
    def consumers(self) -> int:
        """Warps that multiply."""
        return self.row_warps * self.key_groups

    @property
    def slots(self) -> int:
        """Rows of which a lane holds a part."""
        return 2 * self.warp_tiles

    @property
    def tile_keys(self) -> int:
        return self.tile_blocks * BLOCK

    @property
    def tile_bytes(self) -> int:
        return self.tile_blocks * BLOCK_BYTES

    @property
    def quads(self) -> int:
        """Four values each: a lane's outputs."""
        return self.warp_tiles * COLUMN_TILES

    @property
    def exchange_items(self) -> int:
        """Of 16 bytes: a lane's outputs, then its maxima and sums."""
        return self.quads + self.warp_tiles

    def score_places(self, slot: int) -> list[int]:
        """Where a lane's scores of row `slot` stand: two neighbouring keys of every 8."""
        first = slot // 2 * self.tile_blocks * 2
        return [(first + at) * 4 + slot % 2 * 2 + k for at in range(self.tile_blocks * 2) for k in range(2)]

    def output_places(self, slot: int) -> list[int]:
        """Where a lane's outputs of row `slot` stand: two neighbouring columns of every 8."""
        first = slot // 2 * COLUMN_TILES
        return [(first + tile) * 4 + slot % 2 * 2 + k for tile in range(COLUMN_TILES) for k in range(2)]


def divided(value: cutlass.Int32, by: cutlass.Int32 | int) -> cutlass.Int32:
    """The quotient, rounded down, of what is not negative: signed division rounds down, at a price."""
    return cutlass.Int32(cutlass.Uint32(value) // cutlass.Uint32(by))


def split_blocks(
    tiling: Tiling, seq_len: cutlass.Int32, split: cutlass.Int32, splits: cutlass.Int32
) -> tuple[cutlass.Int32, cutlass.Int32]:
    """The first block of a split and the end of its last: whole tiles of the visible blocks, as even as can be."""
    first = cutlass.Int32(0)
    if tiling.sliding_window:
        first = divided(cutlass.max(seq_len - tiling.query_length - tiling.sliding_window + 1, 0), BLOCK)
    last = divided(seq_len + BLOCK - 1, BLOCK)
    count = tile_count(tiling, first, last)
    begin, end = (first + divided(part * count, splits) * tiling.tile_blocks for part in (split, split + 1))
    return begin, cutlass.min(end, last)


def tile_count(tiling: Tiling, first: cutlass.Int32, last: cutlass.Int32) -> cutlass.Int32:
    """Tiles of the blocks [first, last); the last may be cut short."""
    return divided(cutlass.max(last - first, 0) + tiling.tile_blocks - 1, tiling.tile_blocks)


def packed_row(tiling: Tiling, row_warp: cutlass.Int32, lane: cutlass.Int32, slot: int) -> cutlass.Int32:
    return (row_warp * tiling.warp_tiles + slot // 2) * ROWS + slot % 2 * 8 + (lane >> 2)


def query_and_head(tiling: Tiling, row: cutlass.Int32) -> tuple[cutlass.Int32, cutlass.Int32]:
    """Of a packed row: the query among the request's, and the query head among the KV head's group."""
    query = divided(row, tiling.group)
    return query, row - query * tiling.group
