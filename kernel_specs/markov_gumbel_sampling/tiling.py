"""How `markov_gumbel_sampling` is cut: what follows from its statics, and the choice of the statics. Pure Python."""

# ruff: noqa: INP001 - kernel folders are namespace packages

from dataclasses import dataclass

MAX_CTAS = 132  # the multiprocessors of an H200, the fewest of any GPU that is served
MAX_REQUESTS = 8  # columns of the MMA
MAX_WARPS = 12
MIN_WARPS = 4
ROWS = 16  # a row block: the MMA's 16 rows
LANES = 32
PIECE = 32  # columns that four lanes hold in 16 bytes each: two k16 steps
HEADER = 16  # words before the slots of the exchange
LAUNCHES, STUCK = 0, 1  # words of the header
SHARED_WEIGHTS = 208 * 1024  # of the 227 KB that a CTA may have

# The sizes of a `Tiling` that a spec's constraints speak of, as amounts.
NUM_CTAS = f"ceil_div(vocab_rows, {ROWS} * warps * warp_blocks)"
EXCHANGE_WORDS = f"{HEADER} + {MAX_REQUESTS} * num_steps * {NUM_CTAS}"
RESIDENT_BYTES = f"{ROWS} * warps * resident_blocks * (128 * (markov_rank // 64) + 64)"


@dataclass(frozen=True, slots=True)
class Tiling:
    """A CTA's share: `warps` warps of `warp_blocks` row blocks, `resident_blocks` of them kept in shared memory."""

    vocab_rows: int
    markov_rank: int
    warps: int
    warp_blocks: int
    resident_blocks: int

    def __post_init__(self) -> None:
        assert self.markov_rank % PIECE == 0
        assert self.num_ctas <= MAX_CTAS, "all CTAs run at once: each waits for all others"
        assert self.resident_bytes <= SHARED_WEIGHTS

    def statics(self) -> dict[str, int]:
        """The statics of the spec that say all this."""
        return {name: getattr(self, name) for name in ("warps", "warp_blocks", "resident_blocks")}

    @property
    def threads(self) -> int:
        return self.warps * LANES

    @property
    def pieces(self) -> int:
        return self.markov_rank // PIECE

    @property
    def warp_rows(self) -> int:
        return self.warp_blocks * ROWS

    @property
    def cta_rows(self) -> int:
        return self.warps * self.warp_rows

    @property
    def num_ctas(self) -> int:
        return -(-self.vocab_rows // self.cta_rows)

    @property
    def row_bytes(self) -> int:
        return 2 * self.markov_rank

    @property
    def pitch(self) -> int:
        """Bytes from a row in shared memory to the next: an odd multiple of 64, so that two rows fill all banks."""
        return row_pitch(self.markov_rank)

    @property
    def resident_bytes(self) -> int:
        return self.warps * self.resident_blocks * ROWS * self.pitch

    def exchange_words(self, num_steps: int) -> int:
        """64-bit words of the state: the header, then a slot per step, request and CTA."""
        return HEADER + num_steps * MAX_REQUESTS * self.num_ctas


def row_pitch(markov_rank: int) -> int:
    return 2 * markov_rank + (64 if markov_rank % 64 == 0 else 0)


def choose(vocab_rows: int, markov_rank: int) -> Tiling:
    """As few row blocks a CTA as 132 CTAs allow, a warp for each of them up to 12; what fits stays in shared memory."""
    blocks = -(-vocab_rows // ROWS)
    cta_blocks = -(-blocks // MAX_CTAS)
    warp_blocks = -(-cta_blocks // MAX_WARPS)
    warps = max(MIN_WARPS, -(-cta_blocks // warp_blocks))
    fitting = SHARED_WEIGHTS // (warps * ROWS * row_pitch(markov_rank))
    return Tiling(
        vocab_rows=vocab_rows,
        markov_rank=markov_rank,
        warps=warps,
        warp_blocks=warp_blocks,
        resident_blocks=min(warp_blocks, fitting),
    )
