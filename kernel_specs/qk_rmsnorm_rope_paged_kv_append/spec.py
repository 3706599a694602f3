"""QK-norm, RoPE and the append to the paged KV cache, between the QKV projection and attention.

`qkvg` holds [q heads, k heads, v heads, gate heads] of 64 elements per token. For every q and k head:

    h <- h * rsqrt(mean(h^2) + eps)                               FP32, no weight
    (h[2i], h[2i+1]) <- (h[2i] c - h[2i+1] s, h[2i] s + h[2i+1] c)    interleaved pairs, unless `rope` is False

with c = cos_sin[position, i] and s = cos_sin[position, 32 + i] (vLLM's table: cosines in the first half of a row).
q and k are rounded to BF16 once and written back; v and the gate stay. If the token's slot is not negative, k and v
also go to kv_cache[slot // 16, head, slot % 16]: K in columns 0..63, V in 64..127.

The cache's strides are run-time values, so one artifact serves head-major (HND) and token-major (NHD) caches. Backbone
rows and draft query rows are served alike.

Positions, slots and the table are read before `griddepcontrol.wait`. They must be complete before the two launches
that precede this one, the first of which must trigger its dependents after its own wait, as the norms do.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Divisible, Equals, KernelSpec, Scalar, Specialization, Tensor
from jitspark.target import TARGETS

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Attention, Deployment

HEAD_DIM = 64
BLOCK_SIZE = 16
MAX_CTA_HEADS = 128  # eight lanes per head, 1024 threads

# Per rank at TP 4, 8, 16, then the tiny geometries at TP 1 and 2.
HEADS = ((32, 4), (16, 2), (8, 1), (8, 2), (4, 1))


def _sizes(num_heads: int, num_kv_heads: int) -> dict[str, int]:
    size = 2 * HEAD_DIM * (num_heads + num_kv_heads)
    return {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "qkvg_size": size}


def _case(num_tokens: int, heads: tuple[int, int], *, rope: bool, token_major: bool) -> Case:
    # reference.random_arguments makes a token-major cache when the number of blocks is odd
    blocks = {"num_blocks": 2 * num_tokens + 2 + token_major, "max_position": 8192}
    return Case(
        axes={"num_tokens": num_tokens, **_sizes(*heads), **blocks},
        dtypes={},
        statics={"rope": rope},
        rtol=2**-7,  # one BF16 ulp
        atol=2e-6,  # FP32 remains where the two products of a rotation cancel
        note=f"{'token' if token_major else 'head'}-major cache, negative slots, the table's last position",
    )


SPEC = KernelSpec(
    name="qk_rmsnorm_rope_paged_kv_append",
    axes={
        "num_tokens": VAR,
        "num_heads": CONST,
        "num_kv_heads": CONST,
        "qkvg_size": CONST,  # 2 * 64 * (num_heads + num_kv_heads)
        "num_blocks": VAR,
        "max_position": VAR,
    },
    dtypes={},
    statics={"rope": (False, True)},
    args=(
        Tensor("qkvg", ("num_tokens", "qkvg_size"), "bfloat16", role="inout"),
        Tensor("positions", ("num_tokens",), "int64", align=8, when=("rope", True)),
        Tensor("cos_sin", ("max_position", HEAD_DIM), "float32", when=("rope", True)),
        Tensor("slot_mapping", ("num_tokens",), "int64", align=8),
        Tensor(
            "kv_cache",
            ("num_blocks", "num_kv_heads", BLOCK_SIZE, 2 * HEAD_DIM),
            "bfloat16",
            role="inout",
            strides=("block_stride", "head_stride", "token_stride", 1),
            stride_divisor=8,  # 16-byte stores
        ),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Equals(
            "qkvg_size",
            f"{2 * HEAD_DIM} * (num_heads + num_kv_heads)",
            because="a token's row holds as many q as gate heads, k as v heads",
        ),
        Divisible("num_heads", by="num_kv_heads", because="each KV head serves a group of query heads"),
        AtMost("num_heads", MAX_CTA_HEADS // 2, because="one CTA holds a token's q, k and v heads, eight lanes each"),
    ),
    targets=TARGETS,
    kernel="kernel:qk_rmsnorm_rope_paged_kv_append",
    reference="reference:qk_rmsnorm_rope_paged_kv_append",
    early_reads=("positions", "cos_sin", "slot_mapping"),
    instructions=("LDG.E.128", "STG.E.128", "ACQBULK", "PREEXIT"),  # 16-byte accesses, dependent launch
    cases=tuple(
        _case(num_tokens, heads, rope=rope, token_major=token_major)
        for heads in HEADS
        for num_tokens in ((1, 7, 8, 56, 64) if heads == (16, 2) else (8, 56))
        for rope in (True, False)
        for token_major in (False, True)
    ),
)


def serving(attention: "Attention", tp: int, *, rope: bool) -> Specialization:
    """What serves a layer with these heads, for any number of rows."""
    return SPEC.specialize(axes=_sizes(*_heads_per_rank(attention, tp)), statics={"rope": rope})


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """RoPE and NoPE layers of the backbone and of the draft; equal shapes are shared."""
    found = (
        (*_heads_per_rank(attention, deployment.tp), mode == "rope")
        for attention in (deployment.backbone.attention, deployment.draft.attention)
        for mode in attention.position_modes
    )
    for num_heads, num_kv_heads, rope in dict.fromkeys(found):
        yield SPEC.specialize(axes=_sizes(num_heads, num_kv_heads), statics={"rope": rope})


def _heads_per_rank(attention: "Attention", tp: int) -> tuple[int, int]:
    return attention.num_attention_heads // tp, attention.num_key_value_heads // tp
