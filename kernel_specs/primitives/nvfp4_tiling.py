"""How a matrix of NVFP4 weights is cut for tensor cores, and where each code goes. Pure Python.

A tile is 16 rows. Its columns are `ranges` ranges of 64 * groups, one per warp; of the 4 * groups scale blocks of a
range, lane 4 r + q owns blocks q * groups to (q + 1) * groups - 1 of rows r and r + 8. A group is one block of each of
the four: four k16 steps of an MMA, which sees 4 columns of each block in a step.
"""

from dataclasses import dataclass

BLOCK = 16  # columns that share a scale
TILE_ROWS = 16
TOKENS = 8  # of an MMA
LANES = 32
STEPS = 4  # k16 steps of a group, one 32-bit word of a lane each
GROUPS = (2, 4, 8)
MAX_RANGES = 16
COLUMN_UNIT = 128  # the fewest columns that a range can have

# Where a 16-bit half of a word holds sign and magnitude (3 bits) of the code of MMA register 0, 1, 2, 3: the bit of the
# sign, and the lowest bit of the magnitude. FP16 wants them at 15 and 9.
SIGN_BITS = (15, 12, 14, 13)
MAGNITUDE_BITS = (9, 6, 3, 0)


def split_columns(columns: int) -> dict[str, int]:
    """`groups` and `ranges` for this many columns, a multiple of 128."""
    units = columns // (4 * BLOCK)
    groups = max(each for each in GROUPS if units % each == 0)
    return {"groups": groups, "ranges": units // groups}


def step_columns(step: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The columns within a block of a step's low and high register pair: (first half, second half) each.

    The eight codes of a 32-bit word of a row in memory order are columns 0 to 7, so shifting it by 4 j leaves columns
    j and j + 4 in its two halves.
    """
    first = 8 * (step // 2) + 2 * (step % 2)
    return (first, first + 4), (first + 1, first + 5)


@dataclass(frozen=True, slots=True)
class StreamShape:
    """How a grid cuts the row tiles of the active experts into streams.

    tiles: of an expert; of `parts` row tiles each. ranges: warps that share a stream's K, 64 * groups columns each.
    row_warps: streams of a CTA. stages: row tiles' ranges that a warp's ring holds.
    """

    groups: int
    ranges: int
    parts: int
    tiles: int
    row_warps: int
    stages: int
    ctas: int

    def __post_init__(self) -> None:
        assert self.stages % self.parts == 0

    @property
    def warps(self) -> int:
        return self.ranges * self.row_warps

    @property
    def threads(self) -> int:
        return self.warps * LANES

    @property
    def streams(self) -> int:
        return self.ctas * self.row_warps

    @property
    def code_bytes(self) -> int:
        """Of a tile's range."""
        return self.groups * LANES * 16

    @property
    def scale_bytes(self) -> int:
        return self.groups * LANES * 2

    @property
    def stage_bytes(self) -> int:
        return self.code_bytes + self.scale_bytes

    @property
    def ring_bytes(self) -> int:
        """Of a warp."""
        return self.stages * self.stage_bytes
