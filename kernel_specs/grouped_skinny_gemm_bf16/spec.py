"""Skinny BF16 GEMMs of several weights, each with activations of its own, in one launch: the draft's context K/V.

    out[m, g * group_rows + n] = BF16(sum_k activation[g, m, k] * weight[g, n, k])    FP32 sums in a fixed order

As `skinny_gemm_bf16`, whose tiling it shares: one launch per group would leave most multiprocessors idle, as a
group's weight is a few megabytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Divisible, Equals, KernelSpec, Specialization, Tensor
from jitspark.target import TARGETS
from kernel_specs.skinny_gemm_bf16.tiling import BLOCK_COLUMNS, K_SHARE, MAX_STAGES, MAX_TOKENS, SPLITS, Tiling

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment


@dataclass(frozen=True, slots=True)
class Cut:
    """What measured best for so many tokens (NOTES.md): taller tiles, since every tile reads all activations."""

    tile_rows: int
    ctas: int  # at least, in one launch
    row_warps: int
    column_warps: int
    ring_bytes: int = 96 * 1024  # two launches fit on a multiprocessor, so that the next one loads ahead


CUTS = {
    8: Cut(32, 128, row_warps=1, column_warps=4),
    16: Cut(32, 128, row_warps=1, column_warps=4),
    32: Cut(64, 128, row_warps=2, column_warps=2),
    64: Cut(64, 80, row_warps=2, column_warps=4, ring_bytes=160 * 1024),
}


@dataclass(frozen=True, slots=True)
class GroupedProjection:
    """The weights of `groups` projections of equal shape, stacked."""

    groups: int
    group_rows: int
    in_features: int

    @property
    def axes(self) -> dict[str, int]:
        """The CONST axes."""
        return {
            "groups": self.groups,
            "group_rows": self.group_rows,
            "in_features": self.in_features,
            "out_features": self.groups * self.group_rows,
        }

    def tiling(self, num_tokens: int) -> Tiling:
        """How a launch for `num_tokens` (1 to 64) tokens is cut."""
        max_tokens = next(size for size in MAX_TOKENS if size >= num_tokens)
        cut, rows = CUTS[max_tokens], self.groups * self.group_rows
        split = self._split(rows // cut.tile_rows, cut.ctas)
        columns = self.in_features // split
        tile_columns = 128 if max_tokens <= 16 and columns % 128 == 0 else BLOCK_COLUMNS
        chunks = columns // tile_columns
        column_warps = min(cut.column_warps, chunks)
        stages = min(chunks, MAX_STAGES, cut.ring_bytes // (2 * tile_columns * (cut.tile_rows + max_tokens)))
        return Tiling(
            weight_rows=rows,
            out_features=rows,
            in_features=self.in_features,
            max_tokens=max_tokens,
            tile_rows=cut.tile_rows,
            tile_columns=tile_columns,
            split=split,
            row_warps=cut.row_warps,
            column_warps=column_warps,
            stages=stages if stages == chunks else stages // column_warps * column_warps,
        )

    def _split(self, row_tiles: int, ctas: int) -> int:
        """The smallest split of K that makes so many CTAs, or the largest that leaves whole blocks."""
        possible = [split for split in SPLITS if self.in_features % (split * BLOCK_COLUMNS) == 0]
        return next((split for split in possible if row_tiles * split >= ctas), possible[-1])

    def specialize(self, num_tokens: int) -> Specialization:
        """What serves `num_tokens` (1 to 64) tokens, and every smaller number too."""
        return SPEC.specialize(axes=self.axes, statics=self.tiling(num_tokens).statics())


def context_kv(deployment: "Deployment") -> GroupedProjection:
    """The keys and values of all draft layers."""
    draft = deployment.draft
    rows = 2 * draft.attention.key_value_width(deployment.tp)
    return GroupedProjection(draft.num_hidden_layers, rows, draft.hidden_size)


def _case(num_tokens: int, projection: GroupedProjection, note: str) -> Case:
    axes = {"num_tokens": num_tokens, **projection.axes}
    statics = projection.tiling(num_tokens).statics()
    # one BF16 ulp, and FP32 sums of values near 1
    return Case(axes=axes, dtypes={}, statics=statics, rtol=2**-7, atol=1e-4, note=note)


CASES = (
    *(_case(rows, GroupedProjection(5, 256, 8192), "context K/V at TP 8") for rows in (1, 8, 16, 24, 32, 40, 64)),
    *(_case(rows, GroupedProjection(5, 512, 8192), "at TP 4") for rows in (8, 64)),
    *(_case(rows, GroupedProjection(5, 128, 8192), "at TP 16") for rows in (8, 64)),
    *(_case(rows, GroupedProjection(2, 256, 512), "tiny") for rows in (3, 8, 16, 56)),
    *(_case(rows, GroupedProjection(2, 128, 512), "tiny at TP 2") for rows in (8, 64)),
)

SPEC = KernelSpec(
    name="grouped_skinny_gemm_bf16",
    axes={
        "num_tokens": VAR,
        "groups": CONST,
        "group_rows": CONST,
        "in_features": CONST,
        "out_features": CONST,  # groups * group_rows
    },
    dtypes={},
    statics={
        "max_tokens": MAX_TOKENS,  # what the MMA tiles compiled in hold
        "tile_rows": (32, 64),  # weight rows of a CTA
        "tile_columns": (64, 128),  # of K, of a pipeline stage
        "split": SPLITS,  # CTAs of a cluster that share K
        "row_warps": (1, 2),  # warps that share the rows of a stage
        "column_warps": (1, 2, 4),  # groups of warps that take stages in turn
        "stages": tuple(range(1, MAX_STAGES + 1)),
    },
    args=(
        Tensor("activation", ("groups", "num_tokens", "in_features"), "bfloat16"),
        Tensor("weight", ("groups", "group_rows", "in_features"), "bfloat16"),
        Tensor("out", ("num_tokens", "out_features"), "bfloat16", role="out"),
    ),
    constraints=(
        AtMost("num_tokens", "max_tokens", because="a CTA multiplies its weights with all tokens at once"),
        Divisible("in_features", by=BLOCK_COLUMNS, because="a bulk copy's row is 128 bytes"),
        Divisible("group_rows", by="tile_rows", because="a CTA's rows belong to one group"),
        Equals("out_features", "groups * group_rows", because="the outputs of the groups lie side by side"),
        *K_SHARE,
    ),
    targets=TARGETS,
    kernel="kernel:grouped_skinny_gemm_bf16",
    reference="reference:grouped_skinny_gemm_bf16",
    early_reads=("weight",),
    triggers_early=True,
    instructions=("UTMALDG", "HMMA.16816.F32.BF16", "FENCE.VIEW.ASYNC", "ACQBULK", "PREEXIT"),  # as skinny_gemm_bf16
    cases=CASES,
)


def serving(projection: GroupedProjection, num_tokens: int) -> Specialization:
    """What serves these projections for `num_tokens` rows."""
    return projection.specialize(num_tokens)


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """For every number of MMA tiles that the step's 8 to 64 context rows fill."""
    for max_tokens in MAX_TOKENS:
        yield context_kv(deployment).specialize(max_tokens)
