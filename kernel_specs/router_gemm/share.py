"""What a CTA of the router's GEMMs multiplies, and how its threads share that. Pure Python."""

# ruff: noqa: INP001 - kernel folders are namespace packages

from dataclasses import dataclass

SPLITS = (2, 4, 8)  # CTAs of a cluster, each with its part of K
WARP = 32
ROWS = 16  # a row block: the MMA's 16 rows
TOKENS = 8  # a token tile: the MMA's 8 columns
LANE_COLUMNS = 8
PARTS = 3  # BF16 numbers that an FP32 number is the sum of
ITEM = 4  # FP32 sums of a lane, of a row block and a token tile
ITEM_BYTES = 16
WARPS = 8
THREADS = WARP * WARPS
BLOCK = 32  # columns of a warp's part of a slab
SLAB = BLOCK * WARPS  # columns that the warps multiply at a time
ROUTER_PAD = 16  # bytes behind a row


@dataclass(frozen=True, slots=True)
class Share:
    """Row blocks of one weight, and a part of K. `pad` keeps rows that are read together on other banks."""

    blocks: int
    chains: int  # sums that an output has, so that MMAs need not wait for each other
    element_bytes: int
    pad: int
    columns: int
    tiles: int
    split: int

    def __post_init__(self) -> None:
        assert self.columns % SLAB == 0
        assert self.owned * self.split == self.items

    @property
    def slabs(self) -> int:
        return self.columns // SLAB

    @property
    def rows(self) -> int:
        return self.blocks * ROWS

    @property
    def stride(self) -> int:
        """Elements from row to row in shared memory."""
        return self.columns + self.pad // self.element_bytes

    @property
    def row_bytes(self) -> int:
        return self.columns * self.element_bytes

    @property
    def ring_bytes(self) -> int:
        return self.rows * self.stride * self.element_bytes

    @property
    def items(self) -> int:
        """A lane's sums of a row block and a token tile."""
        return self.blocks * self.tiles * WARP

    @property
    def owned(self) -> int:
        """Items that one CTA of the cluster adds up and stores."""
        return self.items // self.split

    @property
    def partial_bytes(self) -> int:
        return WARPS * self.items * ITEM_BYTES

    @property
    def received_bytes(self) -> int:
        return self.items * ITEM_BYTES


def router_share(columns: int, tiles: int, split: int, chains: int = PARTS) -> Share:
    """16 rows of the FP32 router.

    The tensor cores cut off what a sum cannot hold, so small parts are added to sums of their own, as far as there are
    `chains`.
    """
    return Share(1, chains, 4, ROUTER_PAD, columns, tiles, split)
