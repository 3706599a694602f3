"""How `skinny_gemm_bf16` is cut: the sizes that follow from its statics, and the choice of the statics. Pure Python."""

# ruff: noqa: INP001 - kernel folders are namespace packages

from dataclasses import dataclass

from jitspark.constraints import Divisible

MAX_TOKENS = (8, 16, 32, 64)
SPLITS = (1, 2, 4, 8)  # CTAs of a portable cluster
BLOCK_COLUMNS = 64  # K of a block: the 128 bytes that the shared-memory swizzle spans
ROW_BYTES = 128  # of a block
ROWS = 16  # a row block: the MMA's 16 rows
TOKENS = 8  # a token tile: the MMA's 8 columns
LANES = 32
ITEM_BYTES = 16  # an item is one lane's 4 FP32 sums of a row block and a token tile
MAX_TILE_ROWS = 192
TALL_ROWS = 192  # of a tile, at 64 tokens, where these alone give every multiprocessor of an H200 one
WAVE_ROWS = 96  # of a tile, at most, where there are more than a wave of them
MAX_STAGES = 16
# where a split of K measured faster than the rule's, by (weight_rows, in_features)
FASTER_SPLIT = {(512, 8192): 8}
# Clusters of 8 that an H200 holds with one CTA on a multiprocessor, as not all of its GPCs have 16 multiprocessors.
# With one cluster more a launch takes twice as long.
RESIDENT_CLUSTERS = 15
# What a spec demands of K and the statics that share it. A stage is used again where a CTA has more stages' worth of K
# than it has stages; a group of warps then meets every use of its own, so that the phase's parity tells it enough.
K_SHARE = (
    Divisible("in_features", by="split * tile_columns", because="CTAs share K in whole pipeline stages"),
    Divisible(
        "stages * min(1, max(0, in_features // (split * tile_columns) - stages))",
        by="column_warps",
        because="stages that are used again belong to one group of warps each",
    ),
)
LONG_ROW = 8 * 4096  # columns from which on the exchange of a split over 8 CTAs does not count


@dataclass(frozen=True, slots=True)
class Tiling:
    """A CTA's share: `tile_rows` weight rows by `in_features / split` of K, `tile_columns` of K per pipeline stage."""

    weight_rows: int
    out_features: int
    in_features: int
    max_tokens: int
    tile_rows: int
    tile_columns: int
    split: int
    row_warps: int
    column_warps: int
    stages: int

    def __post_init__(self) -> None:
        assert self.halves * self.out_features == self.weight_rows
        assert self.half_rows % (ROWS if self.halves == 2 else 8) == 0, "the swizzle repeats every 8 rows"
        assert self.chunks * self.split * self.tile_columns == self.in_features
        assert self.chunks <= self.stages or self.stages % self.column_warps == 0
        assert self.items % self.split == 0

    def statics(self) -> dict[str, int]:
        """The statics of the spec that say all this, in its order."""
        names = ("max_tokens", "tile_rows", "tile_columns", "split", "row_warps", "column_warps", "stages")
        return {name: getattr(self, name) for name in names}

    @property
    def halves(self) -> int:
        """Weight rows of an output: 2 when a gate and an up row make one."""
        return self.weight_rows // self.out_features

    @property
    def half_rows(self) -> int:
        return self.tile_rows // self.halves

    @property
    def row_tiles(self) -> int:
        return -(-self.out_features // self.half_rows)

    @property
    def token_tiles(self) -> int:
        return self.max_tokens // TOKENS

    @property
    def blocks(self) -> int:
        """64-column blocks of a stage."""
        return self.tile_columns // BLOCK_COLUMNS

    @property
    def chunks(self) -> int:
        """Stages' worth of K that a CTA goes through."""
        return self.in_features // (self.split * self.tile_columns)

    @property
    def consumers(self) -> int:
        """Warps that multiply; one more warp copies."""
        return self.row_warps * self.column_warps

    @property
    def warp_blocks(self) -> int:
        """Row blocks of a half that one warp has; the last ones may reach past the tile."""
        return -(-self.half_rows // (ROWS * self.row_warps))

    @property
    def warp_items(self) -> int:
        """Items that a lane holds."""
        return self.halves * self.warp_blocks * self.token_tiles

    @property
    def items(self) -> int:
        """Items of a half."""
        return self.warp_blocks * self.row_warps * self.token_tiles * LANES

    @property
    def owned_items(self) -> int:
        """Items of a half that one CTA of the cluster adds up and stores."""
        return self.items // self.split

    @property
    def sources(self) -> int:
        """Partial sums of an output."""
        return self.split * self.column_warps

    @property
    def weight_stage(self) -> int:
        return self.blocks * self.tile_rows * ROW_BYTES

    @property
    def activation_stage(self) -> int:
        return self.blocks * self.max_tokens * ROW_BYTES

    @property
    def weight_ring(self) -> int:
        """Bytes, with what the last row block of the last stage reads past the tile."""
        past = self.warp_blocks * self.row_warps * ROWS - self.half_rows
        return self.stages * self.weight_stage + past * ROW_BYTES

    @property
    def exchange(self) -> int:
        """Bytes in which a CTA receives the partial sums of what it owns."""
        return self.sources * self.halves * self.owned_items * ITEM_BYTES if self.sources > 1 else 0

    @property
    def shared_bytes(self) -> int:
        """All of a CTA's shared memory, alignment included."""
        return self.weight_ring + self.stages * (self.activation_stage + 16) + self.exchange + 1024


def choose(weight_rows: int, out_features: int, in_features: int, max_tokens: int) -> Tiling:
    """The tiling of a shape, by rules read off sweeps on an H200 (NOTES.md); 64 divides in_features.

    Up to 16 tokens: 256 CTAs, two on a multiprocessor, so that one loads while the other adds up. More tokens: larger
    tiles and half as many CTAs, since every tile reads all activations. Small weights fill half as many CTAs.
    """
    few, small = max_tokens <= 16, weight_rows <= 1024
    tall = _tall_tiling(weight_rows, out_features, in_features, max_tokens)
    if tall is not None:
        return tall
    ctas = 256 if few and not small else 128
    enough_rows = (16 if small else 24) if few else (32 if small else 36)
    split = _split(in_features, FASTER_SPLIT.get((weight_rows, in_features), -(-enough_rows * ctas // weight_rows)))
    step = 8 if weight_rows == out_features else 2 * ROWS
    tile_rows = -(-weight_rows * split // (ctas * step)) * step
    if tile_rows > (48 if few else WAVE_ROWS):
        tile_rows = WAVE_ROWS
    row_blocks = -(-tile_rows * out_features // (weight_rows * ROWS))
    tile_columns = _tile_columns(in_features // split, max_tokens, tile_rows, row_blocks, small=small)
    chunks = in_features // (split * tile_columns)
    row_warps, column_warps = _warps(max_tokens, tile_rows, row_blocks, tile_columns, chunks, small=small)
    return Tiling(
        weight_rows=weight_rows,
        out_features=out_features,
        in_features=in_features,
        max_tokens=max_tokens,
        tile_rows=tile_rows,
        tile_columns=tile_columns,
        split=split,
        row_warps=row_warps,
        column_warps=column_warps,
        stages=_stages(
            chunks, column_warps, 2 * tile_columns * (tile_rows + max_tokens), _ring_bytes(max_tokens, small=small)
        ),
    )


def _tall_tiling(weight_rows: int, out_features: int, in_features: int, max_tokens: int) -> Tiling | None:
    """More tokens, and rows that are many or long: tiles so tall that reading the activations again costs little.

    Every CTA reads the activations of its columns, so with few rows a tile these would be most of the bytes. Long rows
    are shared by 8 CTAs, in the tallest tiles that as many clusters as are resident leave.
    """
    if max_tokens <= 16 or weight_rows != out_features:
        return None
    cut = None
    tile_rows = -(-weight_rows // (RESIDENT_CLUSTERS * 8)) * 8
    if 64 < tile_rows <= 80 and in_features >= LONG_ROW and in_features % (8 * 128) == 0:
        row_warps = 3 if max_tokens == 32 else 5  # equally fast at 32, but five spill on Blackwell
        cut = {"tile_rows": tile_rows, "tile_columns": 128, "split": 8, "row_warps": row_warps, "ring": 160 * 1024}
    elif max_tokens == 64 and weight_rows > 128 * TALL_ROWS and in_features >= 2 * BLOCK_COLUMNS:
        cut = {"tile_rows": TALL_ROWS, "tile_columns": BLOCK_COLUMNS, "split": 1, "row_warps": 4, "ring": 128 * 1024}
    if cut is None:
        return None
    stage_bytes = 2 * cut["tile_columns"] * (cut["tile_rows"] + max_tokens)
    stages = _stages(in_features // (cut["split"] * cut["tile_columns"]), 2, stage_bytes, cut.pop("ring"))
    return Tiling(weight_rows, out_features, in_features, max_tokens, stages=stages, column_warps=2, **cut)


def _split(in_features: int, wanted: int) -> int:
    """The smallest split of K that is at least `wanted`, or the largest that leaves whole blocks."""
    possible = [split for split in SPLITS if in_features % (split * BLOCK_COLUMNS) == 0]
    return next((split for split in possible if split >= wanted), possible[-1])


def _tile_columns(columns: int, max_tokens: int, tile_rows: int, row_blocks: int, *, small: bool) -> int:
    """Columns of a stage, for a CTA that has `columns` of K and `row_blocks` row blocks in a half."""
    if max_tokens == 8 and tile_rows <= 16 and columns > 4096:
        wanted = 256  # a stage of 4 KB is too small for long rows
    elif max_tokens <= 16:
        wanted = 128
    elif row_blocks % 2 == 1:
        wanted = BLOCK_COLUMNS
    else:
        few_columns = columns <= (1024 if max_tokens == 32 else 2048)
        wanted = 128 if few_columns == (max_tokens == 32) or (small and columns > 1024) else BLOCK_COLUMNS
    return wanted if columns % wanted == 0 else BLOCK_COLUMNS


def _warps(
    max_tokens: int, tile_rows: int, row_blocks: int, tile_columns: int, chunks: int, *, small: bool
) -> tuple[int, int]:
    """Row warps and column warps. Row warps read activations again, column warps add partial sums."""
    if max_tokens == 8:
        row_warps, column_warps = 1, 8 if tile_rows == 16 and chunks == MAX_STAGES else 4
    elif row_blocks % 2 == 1:
        row_warps, column_warps = 1, 2 if max_tokens == 16 and row_blocks > 1 else 4
    elif row_blocks == 6 and max_tokens == 64:
        row_warps, column_warps = 3, 2
    else:
        row_warps, column_warps = 2, 4 if max_tokens > 16 and tile_columns == BLOCK_COLUMNS and not small else 2
    while column_warps > chunks:
        column_warps //= 2
    return row_warps, column_warps


def _ring_bytes(max_tokens: int, *, small: bool) -> int:
    """With up to 16 tokens, or little to read, the next launch shall find room on the same multiprocessor."""
    if max_tokens <= 16:
        return 100 * 1024
    if small:
        return 96 * 1024 if max_tokens == 32 else 80 * 1024
    return 160 * 1024


def _stages(chunks: int, column_warps: int, stage_bytes: int, ring_bytes: int) -> int:
    stages = min(chunks, MAX_STAGES, max(4, ring_bytes // stage_bytes))
    return stages if stages == chunks else stages // column_warps * column_warps
