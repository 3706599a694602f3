"""How the BF16 grouped GEMMs are cut: sizes that follow from their statics, and the statics' choice. Pure Python."""

from dataclasses import dataclass

PASS_ROWS = (8, 16)  # rows of an expert that are multiplied at once
TILE_ROWS = 32  # weight rows of a tile: two row blocks of the MMA
ROWS = 16  # a row block
TOKENS = 8  # a token tile: the MMA's columns
LANES = 32
BLOCK_COLUMNS = 64  # K of a block: the 128 bytes that the shared-memory swizzle spans
ROW_BYTES = 128  # of a block
ITEM_BYTES = 16  # an item is one lane's four FP32 sums of a row block and a token tile
PAD_BYTES = 16  # behind an activation row: eight rows read together then touch all banks once
MAX_STAGES = 8
RING_BYTES = 102 * 1024  # so that two CTAs fit on a multiprocessor
CTA_STEPS = 8  # stages' worth that a CTA shall go through at least: 128 KB of weights


@dataclass(frozen=True, slots=True)
class GroupedTiling:
    """A CTA's share: `cta_tiles` tiles of one expert, each of 32 weight rows by all of K, with all of its rows.

    `parts` is 2 where a gate and an up row make one output. `pass_rows` rows are multiplied at once; an expert that
    has more of them is multiplied again.
    """

    in_features: int
    out_features: int
    parts: int
    pass_rows: int
    tile_columns: int
    stages: int
    cta_tiles: int

    def __post_init__(self) -> None:
        assert self.chunks * self.tile_columns == self.in_features
        assert self.blocks * BLOCK_COLUMNS == self.tile_columns
        assert self.row_groups * self.cta_tiles * self.part_rows == self.out_features
        assert self.token_tiles * TOKENS == self.pass_rows <= LANES, "a lane copies a row"

    @property
    def part_rows(self) -> int:
        """Outputs of a tile, and weight rows of each part."""
        return TILE_ROWS // self.parts

    @property
    def row_groups(self) -> int:
        """CTAs of an expert."""
        return self.out_features // (self.part_rows * self.cta_tiles)

    @property
    def chunks(self) -> int:
        """Stages' worth of K."""
        return self.in_features // self.tile_columns

    @property
    def blocks(self) -> int:
        """64-column blocks of a stage; as many warps multiply, one block each."""
        return self.tile_columns // BLOCK_COLUMNS

    @property
    def token_tiles(self) -> int:
        return self.pass_rows // TOKENS

    @property
    def items(self) -> int:
        """Items of a tile."""
        return TILE_ROWS // ROWS * self.token_tiles * LANES

    @property
    def weight_stage(self) -> int:
        return self.blocks * TILE_ROWS * ROW_BYTES

    @property
    def activation_row(self) -> int:
        """Bytes of a row in a stage."""
        return self.tile_columns * 2

    @property
    def activation_pitch(self) -> int:
        return self.activation_row + PAD_BYTES

    @property
    def activation_stage(self) -> int:
        return self.pass_rows * self.activation_pitch

    @property
    def partials(self) -> int:
        """Bytes in which the warps' sums of a tile meet."""
        return self.blocks * self.items * ITEM_BYTES

    @property
    def shared_bytes(self) -> int:
        """All of a CTA's shared memory, alignment included."""
        return self.stages * (self.weight_stage + self.activation_stage + 16) + self.partials + 1024


def choose(in_features: int, out_features: int, parts: int, num_tokens: int) -> dict[str, int]:
    """The statics for up to 8, or up to 64, tokens."""
    pass_rows = PASS_ROWS[0] if num_tokens <= PASS_ROWS[0] else PASS_ROWS[1]
    tile_columns = 256 if in_features % 256 == 0 else 128
    tiles = out_features * parts // TILE_ROWS
    chunks = in_features // tile_columns
    cta_tiles = next((n for n in (8, 4, 2) if n * chunks <= CTA_STEPS and tiles % n == 0), 1)
    stage = tile_columns * 2 * (TILE_ROWS + pass_rows) + pass_rows * PAD_BYTES
    return {
        "pass_rows": pass_rows,
        "tile_columns": tile_columns,
        "stages": min(MAX_STAGES, RING_BYTES // stage),
        "cta_tiles": cta_tiles,
    }
