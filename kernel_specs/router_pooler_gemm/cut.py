"""How `router_pooler_gemm` is cut: the sizes that follow from its statics. Pure Python."""

# ruff: noqa: INP001 - kernel folders are namespace packages

from dataclasses import dataclass

SPLITS = (2, 4, 8)  # CTAs of a cluster
TOKEN_CLASSES = (8, 16)  # more tokens are two launches' work: NOTES.md
# On a multiprocessor. A cluster lies within a GPC, and GPCs do not have 16 multiprocessors each: with two CTAs on each
# multiprocessor an H200 holds 31 clusters of 8, one less than there are at TP 8.
CTAS = 3
SHARED_BYTES = 228 * 1024  # of a multiprocessor, of which a CTA takes 1 KB beside its own
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
BUDGET = SHARED_BYTES // CTAS - 1024 - 256  # bytes of a CTA, barriers left out
ROUTER_PAD, POOLER_PAD = 16, 64  # bytes behind a row
# The weights of a `Cut` and the sums that it receives, as a spec's constraint speaks of them.
RING_AND_RECEIVED = (
    f"max({ROWS} * (4 * hidden_size // split + {ROUTER_PAD}), pooler_rows * (2 * hidden_size // split + {POOLER_PAD}))"
    f" + pooler_rows // {ROWS} * (max_tokens // {TOKENS}) * {WARP * ITEM_BYTES}"
)


@dataclass(frozen=True, slots=True)
class Share:
    """What a CTA multiplies: row blocks of one weight. `pad` keeps rows that are read together on other banks."""

    blocks: int
    chains: int  # sums that an output has, so that MMAs need not wait for each other
    element_bytes: int
    pad: int
    columns: int
    tiles: int
    split: int

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


@dataclass(frozen=True, slots=True)
class Cut:
    """Both weights' shares, and what a CTA takes for the larger one."""

    num_experts: int
    hidden_size: int
    pooled_width: int
    max_tokens: int
    split: int
    pooler_rows: int

    def __post_init__(self) -> None:
        assert self.slabs * SLAB * self.split == self.hidden_size
        assert self.pooler_rows % ROWS == 0
        assert self.ring_bytes + self.received_bytes <= BUDGET

    @property
    def columns(self) -> int:
        """Of K, of a CTA."""
        return self.hidden_size // self.split

    @property
    def slabs(self) -> int:
        return self.columns // SLAB

    @property
    def tiles(self) -> int:
        return self.max_tokens // TOKENS

    @property
    def router(self) -> Share:
        # The tensor cores cut off what a sum cannot hold, so small parts are added to sums of their own.
        return self._share(1, chains=PARTS, element_bytes=4, pad=ROUTER_PAD)

    @property
    def pooler(self) -> Share:
        return self._share(self.pooler_rows // ROWS, chains=2, element_bytes=2, pad=POOLER_PAD)

    def _share(self, blocks: int, chains: int, element_bytes: int, pad: int) -> Share:
        return Share(blocks, chains, element_bytes, pad, self.columns, self.tiles, self.split)

    @property
    def router_tiles(self) -> int:
        return -(-self.num_experts // ROWS)

    @property
    def pooler_tiles(self) -> int:
        return -(-self.pooled_width // self.pooler_rows)

    @property
    def ring_bytes(self) -> int:
        return max(self.router.ring_bytes, self.pooler.ring_bytes)

    @property
    def partial_bytes(self) -> int:
        return max(self.router.partial_bytes, self.pooler.partial_bytes)

    @property
    def received_bytes(self) -> int:
        return max(self.router.received_bytes, self.pooler.received_bytes)

    @property
    def reuse(self) -> bool:
        """Whether the sums of the warps take the room of the weights."""
        return self.ring_bytes + self.received_bytes + self.partial_bytes > BUDGET
