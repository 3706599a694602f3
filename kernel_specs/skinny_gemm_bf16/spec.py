"""Skinny BF16 GEMM: 1 to 64 tokens times a weight that is read once, as vLLM holds it (row-major, not repacked).

    product[m, n] = BF16(sum_k activation[m, k] * weight[n, k])     FP32 sums in a fixed order: same input, same bits
    store:     out = product
    silu_mul:  out = BF16(silu(gate) * up), the rows of weight being [gate; up]

It serves every dense projection of the step. Its time is the weight's bytes over the memory bandwidth; the tiling
keeps enough of them in flight and splits them evenly.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Divisible, Equals, KernelSpec, Specialization, Static, Tensor
from jitspark.target import TARGETS
from kernel_specs.skinny_gemm_bf16.tiling import (
    BLOCK_COLUMNS,
    K_SHARE,
    MAX_STAGES,
    MAX_TILE_ROWS,
    MAX_TOKENS,
    SPLITS,
    choose,
)

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Deployment

STORE, SILU_MUL = "store", "silu_mul"


@dataclass(frozen=True, slots=True)
class Projection:
    """A dense weight of one rank, and what follows the product."""

    weight_rows: int
    in_features: int
    epilogue: str = STORE

    @property
    def out_features(self) -> int:
        return self.weight_rows // (2 if self.epilogue == SILU_MUL else 1)

    @property
    def axes(self) -> dict[str, int]:
        """The CONST axes."""
        return {name: getattr(self, name) for name in ("weight_rows", "out_features", "in_features")}

    def statics(self, num_tokens: int) -> dict[str, Static]:
        """The statics for `num_tokens` (1 to 64) tokens."""
        max_tokens = next(size for size in MAX_TOKENS if size >= num_tokens)
        tiling = choose(self.weight_rows, self.out_features, self.in_features, max_tokens)
        return {"epilogue": self.epilogue, **tiling.statics()}

    def specialize(self, num_tokens: int) -> Specialization:
        """What serves `num_tokens` tokens of this projection, and every smaller number too."""
        return SPEC.specialize(axes=self.axes, statics=self.statics(num_tokens))


def projections(deployment: "Deployment") -> dict[str, Projection]:
    """Every dense weight of a rank, by its use; `_shard` are the column shards of weights that also serve whole."""
    backbone, draft, tp = deployment.backbone, deployment.draft, deployment.tp
    hidden, moe = backbone.hidden_size, backbone.experts.moe_hidden_size
    return {
        "qkv_gate": Projection(backbone.attention.qkv_gate_width(tp), hidden),
        "o_proj": Projection(hidden, backbone.attention.query_width(tp)),
        "pooler": Projection(moe, hidden),
        "pooler_shard": Projection(moe // tp, hidden),
        "unpooler": Projection(hidden, moe),
        "unpooler_shard": Projection(hidden // tp, moe),
        "lm_head": Projection(backbone.vocab_rows(tp), hidden),
        "draft_qkv_gate": Projection(draft.attention.qkv_gate_width(tp), draft.hidden_size),
        "draft_o_proj": Projection(draft.hidden_size, draft.attention.query_width(tp)),
        "draft_gate_up": Projection(2 * draft.intermediate_width(tp), draft.hidden_size, SILU_MUL),
        "draft_down": Projection(draft.hidden_size, draft.intermediate_width(tp)),
        "draft_fc": Projection(draft.hidden_size, draft.fc_width),
        "draft_fc_shard": Projection(draft.hidden_size // tp, draft.fc_width),
        "draft_context_kv": Projection(2 * draft.attention.key_value_width(tp), draft.hidden_size),
        "draft_lm_head": Projection(draft.vocab_rows(tp), draft.hidden_size),
    }


def serving(projection: Projection, num_tokens: int) -> Specialization:
    """What serves this projection for `num_tokens` rows."""
    return projection.specialize(num_tokens)


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Every projection for every number of MMA tiles that the step's 7 to 64 rows fill."""
    for projection in dict.fromkeys(projections(deployment).values()):
        for max_tokens in MAX_TOKENS:
            yield projection.specialize(max_tokens)


def _case(num_tokens: int, projection: Projection, note: str = "") -> Case:
    # store: one BF16 ulp, and FP32 sums of values near 1. silu_mul: a gate that rounds the other way moves
    # silu by several ulp where the gate is negative
    rtol, atol = (2**-7, 1e-4) if projection.epilogue == STORE else (2**-5, 1e-3)
    axes = {"num_tokens": num_tokens, **projection.axes}
    return Case(axes=axes, dtypes={}, statics=projection.statics(num_tokens), rtol=rtol, atol=atol, note=note)


CASES = (
    *(_case(rows, Projection(1280, 512), "tiny qkv+gate") for rows in (1, 7, 8, 14, 21, 32, 49, 64)),
    *(_case(rows, Projection(128, 256), "smaller than a wave") for rows in (8, 64)),
    *(_case(rows, Projection(1003, 512), "odd number of rows") for rows in (5, 56)),
    *(_case(rows, Projection(1580, 2048), "rows as of a vocabulary shard, not a multiple of 8") for rows in (8, 40)),
    *(_case(rows, Projection(512, 8192), "pooler shard") for rows in (8, 16, 32, 64)),
    *(_case(rows, Projection(1024, 4096), "unpooler shard") for rows in (8, 16, 32, 64)),
    *(_case(rows, Projection(2304, 8192), "qkv+gate") for rows in (8, 16, 32, 64)),
    *(_case(rows, Projection(8192, 1024), "o_proj") for rows in (8, 16, 32, 64)),
    *(_case(rows, Projection(8192, 2048), "draft down") for rows in (56, 64)),
    *(_case(rows, Projection(25256, 512), "as many rows as of a vocabulary shard") for rows in (32, 49, 64)),
    *(_case(rows, Projection(256, 40960), "longest sums") for rows in (8, 49)),
    *(_case(rows, Projection(1024, 40960), "draft fc shard") for rows in (8, 16, 32, 56, 64)),
    *(_case(rows, Projection(2048, 512, SILU_MUL), "tiny gate_up") for rows in (1, 7, 8, 14, 21, 49, 64)),
    *(_case(rows, Projection(4096, 8192, SILU_MUL), "gate_up") for rows in (8, 56)),
    _case(8, Projection(25256, 8192), "lm_head shard at TP 8"),
)

SPEC = KernelSpec(
    name="skinny_gemm_bf16",
    axes={
        "num_tokens": VAR,
        "in_features": CONST,
        "weight_rows": CONST,
        "out_features": CONST,  # weight_rows, or half of them for silu_mul
    },
    dtypes={},
    statics={
        "epilogue": (STORE, SILU_MUL),
        "max_tokens": MAX_TOKENS,  # what the MMA tiles compiled in hold
        "tile_rows": tuple(range(8, MAX_TILE_ROWS + 1, 8)),  # weight rows of a CTA
        "tile_columns": (64, 128, 256),  # of K, of a pipeline stage
        "split": SPLITS,  # CTAs of a cluster that share K
        "row_warps": (1, 2, 3, 4, 5),  # warps that share the rows of a stage
        "column_warps": (1, 2, 4, 8),  # groups of warps that take stages in turn
        "stages": tuple(range(1, MAX_STAGES + 1)),
    },
    args=(
        Tensor("activation", ("num_tokens", "in_features"), "bfloat16"),
        Tensor("weight", ("weight_rows", "in_features"), "bfloat16"),
        Tensor("out", ("num_tokens", "out_features"), "bfloat16", role="out"),
    ),
    constraints=(
        AtMost("num_tokens", "max_tokens", because="a CTA multiplies its weights with all tokens at once"),
        Divisible("in_features", by=BLOCK_COLUMNS, because="a bulk copy's row is 128 bytes"),
        *K_SHARE,
        Equals("weight_rows", "out_features", because="an output's weights are one row", when=("epilogue", STORE)),
        Equals("weight_rows", "2 * out_features", because="they are a gate and an up row", when=("epilogue", SILU_MUL)),
        Divisible("tile_rows", by=32, because="the MMA has 16 rows of each", when=("epilogue", SILU_MUL)),
    ),
    targets=TARGETS,
    kernel="kernel:skinny_gemm_bf16",
    reference="reference:skinny_gemm_bf16",
    early_reads=("weight",),
    triggers_early=True,
    instructions=(
        "UTMALDG",  # bulk tensor copies
        "HMMA.16816.F32.BF16",
        "FENCE.VIEW.ASYNC",  # without it a copy overtakes loads of the stage it refills
        "ACQBULK",
        "PREEXIT",
    ),
    cases=CASES,
)
