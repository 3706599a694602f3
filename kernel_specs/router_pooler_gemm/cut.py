"""How `router_pooler_gemm` is cut: the sizes that follow from its statics. Pure Python."""

# ruff: noqa: INP001 - kernel folders are namespace packages

from dataclasses import dataclass

from kernel_specs.router_gemm.share import (
    ITEM_BYTES,
    ROUTER_PAD,
    ROWS,
    SLAB,
    TOKENS,
    WARP,
    Share,
    router_share,
)

TOKEN_CLASSES = (8, 16)  # more tokens are two launches' work: NOTES.md
# On a multiprocessor. A cluster lies within a GPC, and GPCs do not have 16 multiprocessors each: with two CTAs on each
# multiprocessor an H200 holds 31 clusters of 8, one less than there are at TP 8.
CTAS = 3
SHARED_BYTES = 228 * 1024  # of a multiprocessor, of which a CTA takes 1 KB beside its own
BUDGET = SHARED_BYTES // CTAS - 1024 - 256  # bytes of a CTA, barriers left out
POOLER_PAD = 64  # bytes behind a row
# The weights of a `Cut` and the sums that it receives, as a spec's constraint speaks of them.
RING_AND_RECEIVED = (
    f"max({ROWS} * (4 * hidden_size // split + {ROUTER_PAD}), pooler_rows * (2 * hidden_size // split + {POOLER_PAD}))"
    f" + pooler_rows // {ROWS} * (max_tokens // {TOKENS}) * {WARP * ITEM_BYTES}"
)


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
        return router_share(self.columns, self.tiles, self.split)

    @property
    def pooler(self) -> Share:
        return Share(self.pooler_rows // ROWS, 2, 2, POOLER_PAD, self.columns, self.tiles, self.split)

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
