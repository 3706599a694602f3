"""Keys and values of the context rows of all draft layers: K-norm, RoPE, and the append to each layer's paged cache.

`kv` holds, per row, [k heads, v heads] of 64 elements for layer 0, then for layer 1, and so on. For every k head:

    k <- BF16(k * rsqrt(mean(k^2) + eps))                             no weight
    (k[2i], k[2i+1]) <- BF16(k[2i] c - k[2i+1] s, k[2i] s + k[2i+1] c)    interleaved pairs, unless `rope` is False

with c = cos_sin[position, i] and s = cos_sin[position, 32 + i] of an FP32 table, in FP32. (Stock rounds the table to
BF16 first, so a rotated element may differ from its by a little more than an ulp.) Where slot_mapping_l[row] is not
negative, k and v go to kv_cache_l[slot // 16, head, slot % 16]: K in columns 0..63, V in 64..127. `kv` itself stays.

Layers may belong to different groups of the KV cache, so each has slots of its own; their caches have equal strides,
which are run-time values: one artifact serves head-major (HND) and token-major (NHD) caches. Positions, slots and the
table are read before `griddepcontrol.wait`: they must be complete before the two launches that precede this one, the
first of which must trigger its dependents after its own wait.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Equals, KernelSpec, Scalar, Specialization, Tensor
from jitspark.target import TARGETS

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Attention, Deployment

HEAD_DIM = 64
BLOCK_SIZE = 16
MAX_LAYERS = 8
MAX_KV_HEADS = 64  # a CTA holds a row's k and v heads of a layer, eight lanes each


def _sizes(num_kv_heads: int, num_layers: int) -> dict[str, int]:
    return {"num_kv_heads": num_kv_heads, "kv_size": 2 * HEAD_DIM * num_kv_heads * num_layers}


def _case(num_tokens: int, num_kv_heads: int, num_layers: int, *, rope: bool, token_major: bool) -> Case:
    # reference.random_arguments makes token-major caches when the number of blocks is odd
    blocks = {"num_blocks": 2 * num_tokens + 2 + token_major, "max_position": 8192}
    return Case(
        axes={"num_tokens": num_tokens, **_sizes(num_kv_heads, num_layers), **blocks},
        dtypes={},
        statics={"rope": rope, "num_layers": num_layers},
        # k is rounded before it is rotated: where FP32 and float64 fall on two sides of a tie, two elements move
        rtol=2**-6,
        atol=2**-7,
        note=f"{'token' if token_major else 'head'}-major caches, other slots in each layer, negative ones among them",
    )


SPEC = KernelSpec(
    name="context_kv_precompute_append",
    axes={
        "num_tokens": VAR,
        "num_kv_heads": CONST,
        "kv_size": CONST,  # num_layers * 2 * num_kv_heads * 64
        "num_blocks": VAR,
        "max_position": VAR,
    },
    dtypes={},
    statics={"rope": (False, True), "num_layers": tuple(range(1, MAX_LAYERS + 1))},
    args=(
        Tensor("kv", ("num_tokens", "kv_size"), "bfloat16"),
        Tensor("positions", ("num_tokens",), "int64", align=8, when=("rope", True)),
        Tensor("cos_sin", ("max_position", HEAD_DIM), "float32", when=("rope", True)),
        # an argument exists for one value of a static, so each number of layers has its own
        *(
            Tensor(f"slot_mapping_{layer}", ("num_tokens",), "int64", align=8, when=("num_layers", layers))
            for layers in range(1, MAX_LAYERS + 1)
            for layer in range(layers)
        ),
        *(
            Tensor(
                f"kv_cache_{layer}",
                ("num_blocks", "num_kv_heads", BLOCK_SIZE, 2 * HEAD_DIM),
                "bfloat16",
                role="inout",
                strides=("block_stride", "head_stride", "token_stride", 1),
                stride_divisor=8,  # 16-byte stores
                when=("num_layers", layers),
            )
            for layers in range(1, MAX_LAYERS + 1)
            for layer in range(layers)
        ),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Equals(
            "kv_size",
            f"{2 * HEAD_DIM} * num_kv_heads * num_layers",
            because="every layer has as many heads, and as many k as v heads",
        ),
        AtMost(
            "num_kv_heads", MAX_KV_HEADS, because="one CTA holds a row's k and v heads of a layer, eight lanes each"
        ),
    ),
    targets=TARGETS,
    kernel="kernel:context_kv_precompute_append",
    reference="reference:context_kv_precompute_append",
    early_reads=("positions", "cos_sin", *(f"slot_mapping_{layer}" for layer in range(MAX_LAYERS))),
    instructions=("LDG.E.128", "STG.E.128", "ACQBULK", "PREEXIT"),  # 16-byte accesses, dependent launch
    cases=(
        *(
            _case(num_tokens, 2, 5, rope=rope, token_major=token_major)
            for num_tokens in (1, 8, 16, 56, 64)
            for rope in (True, False)
            for token_major in (False, True)
        ),
        *(_case(num_tokens, heads, 5, rope=True, token_major=False) for heads in (4, 1) for num_tokens in (8, 64)),
        *(_case(num_tokens, heads, 2, rope=True, token_major=True) for heads in (2, 1) for num_tokens in (8, 64)),
    ),
)


def serving(attention: "Attention", tp: int, num_layers: int, *, rope: bool) -> Specialization:
    """What serves a draft of so many layers, all with RoPE or all without."""
    sizes = _sizes(attention.key_value_heads(tp), num_layers)
    return SPEC.specialize(axes=sizes, statics={"rope": rope, "num_layers": num_layers})


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Each position mode that the draft may have."""
    draft = deployment.draft
    for mode in draft.attention.position_modes:
        yield serving(draft.attention, deployment.tp, draft.num_hidden_layers, rope=mode == "rope")
