"""Attention of a verify step over the paged KV cache, its keys split over CTAs: partial results for a later merge.

A request has `query_length` consecutive tokens, the last of its `seq_len` tokens. Its query j sees the keys
k <= seq_len - query_length + j, with a window only those k > seq_len - query_length + j - window, so that the window
counts the query's own key. The visible keys of a request lie in the cache blocks f to e - 1, tile t being the blocks
f + t * tile_blocks and so on, as many or up to e - 1. Of T tiles, split s of S takes those from floor(s T / S) to
floor((s + 1) T / S) - 1. Over the visible keys of its tiles it writes

    partial_max = max(t),  t = log2(e) * softmax_scale * q . k                             -inf without a key
    partial_sum = sum(2^(t - partial_max))                                                 0 without a key
    partial_out = sum(BF16(2^(t - m)) * v)                                                 0 without a key

in FP32, where m is the largest t so far on the way to partial_max (and the sum is rescaled when it grows): rounding
the weights to BF16 is the only rounding besides FP32's. A request of length 0 (padding) has no visible key.

No block is read that holds no visible key, and nothing that is read of others' or unwritten tokens reaches a result.
The cache's strides are run-time values, so one artifact serves head-major (HND) and token-major (NHD) caches. `qkvg`
holds the queries in its first columns. seq_lens and block_table must have been written before the launch that
precedes this one: they are read before `griddepcontrol.wait`. Block ids and lengths are not checked.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from jitspark.spec import CONST, VAR, AtMost, Case, Divisible, Equals, KernelSpec, Scalar, Specialization, Tensor
from jitspark.target import TARGETS

if TYPE_CHECKING:  # cases are checked where no geometry library is installed
    from jitspark.geometry import Attention, Decoder, Deployment

HEAD_DIM = 64
BLOCK_SIZE = 16
RING_BYTES = 64 * 1024  # two launches fit on a multiprocessor; more would be prefetched than pays (NOTES.md)
FULL_CTAS, WINDOW_CTAS = 128, 132  # in one launch; what measured best with 132 multiprocessors (NOTES.md)
BLOCK_BYTES = BLOCK_SIZE * 2 * HEAD_DIM * 2  # keys and values of one KV head
LANES = 32
ROW_WARPS = "ceil_div(query_length * num_heads // num_kv_heads, 16 * warp_tiles)"  # of a key group
EXCHANGE_BYTES = LANES * 4 * (HEAD_DIM // 2 + 4)  # a warp's outputs of 16 rows, their maxima and sums

# Per rank at TP 4, 8, 16, then the tiny geometries at TP 1 and 2.
HEADS = ((32, 4), (16, 2), (8, 1), (8, 2), (4, 1))
MAX_BLOCKS = 130  # of a case's requests: up to 2080 keys
LONG_BLOCKS = 2049  # up to 32784
FULL_BLOCKS = 8192  # 131072 keys, the longest context


def _case(
    query_length: int, heads: tuple[int, int], window: int, splits: int, *, requests: int = 24, blocks: int = MAX_BLOCKS
) -> Case:
    """Requests of the lengths that reference.LENGTHS lists; one alone is as long as reference.length_alone says."""
    # reference.random_arguments makes a token-major cache when the number of splits is odd
    return Case(
        axes={
            "num_tokens": requests * query_length,
            "num_requests": requests,
            **_sizes(query_length, *heads),
            "num_blocks": requests * blocks + 3,
            "max_blocks": blocks,
            "num_splits": splits,
        },
        dtypes={},
        statics=statics(window),
        # A weight and its reference are rounded relative to two maxima: half a BF16 ulp each, of values up to ~5.
        rtol=2**-7,
        atol=2**-5,
        tolerances={"partial_max": (2e-6, 1e-5), "partial_sum": (1e-4, 1e-4)},
        note="lengths at the edges of blocks, tiles and windows; NaN in every byte of the cache that no query may see",
    )


def _sizes(query_length: int, num_heads: int, num_kv_heads: int) -> dict[str, int]:
    return {
        "query_length": query_length,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "qkvg_size": 2 * HEAD_DIM * (num_heads + num_kv_heads),
    }


def statics(sliding_window: int) -> dict[str, int]:
    """Tiles of 64 keys. Two groups of warps hide each other's latency; a window leaves a split a tile or two."""
    tile_blocks = 4
    return {
        "sliding_window": sliding_window,
        "tile_blocks": tile_blocks,
        "stages": RING_BYTES // (tile_blocks * BLOCK_BYTES),
        "warp_tiles": 1,
        "key_groups": 1 if sliding_window else 2,
    }


SPEC = KernelSpec(
    name="paged_gqa_verify_attention",
    axes={
        "num_tokens": VAR,  # num_requests * query_length
        "num_requests": VAR,
        "query_length": CONST,
        "num_heads": CONST,
        "num_kv_heads": CONST,
        "qkvg_size": CONST,  # 2 * 64 * (num_heads + num_kv_heads)
        "num_blocks": VAR,
        "max_blocks": VAR,  # of a request
        "num_splits": VAR,  # that share the keys of a request and KV head; fill the multiprocessors once
    },
    dtypes={},
    statics={
        "sliding_window": (0, 64, 128, 256, 512, 1024, 2048, 4096),  # keys, the query's own included; 0: every key
        "tile_blocks": (1, 2, 4),  # cache blocks of a pipeline stage
        "stages": tuple(range(2, 49)),
        "warp_tiles": (1, 2),  # 16-row tiles of a warp
        "key_groups": (1, 2, 3, 4),  # groups of warps that take the tiles in turn
    },
    args=(
        Tensor("qkvg", ("num_tokens", "qkvg_size"), "bfloat16"),
        Tensor(
            "kv_cache",
            ("num_blocks", "num_kv_heads", BLOCK_SIZE, 2 * HEAD_DIM),
            "bfloat16",
            strides=("block_stride", "head_stride", "token_stride", 1),
            stride_divisor=8,  # bulk tensor copies
        ),
        Tensor("block_table", ("num_requests", "max_blocks"), "int32", strides=("table_stride", 1), align=4),
        Tensor("seq_lens", ("num_requests",), "int32", align=4),
        Tensor("partial_max", ("num_tokens", "num_heads", "num_splits"), "float32", role="out", align=4),
        Tensor("partial_sum", ("num_tokens", "num_heads", "num_splits"), "float32", role="out", align=4),
        Tensor("partial_out", ("num_tokens", "num_heads", "num_splits", HEAD_DIM), "float32", role="out"),
        Scalar("softmax_scale", "float32"),
    ),
    constraints=(
        Divisible("num_tokens", by="query_length", because="every request has as many rows"),
        Equals(
            "qkvg_size",
            f"{2 * HEAD_DIM} * (num_heads + num_kv_heads)",
            because="a token's row holds as many q as gate heads, k as v heads",
        ),
        Divisible("num_heads", by="num_kv_heads", because="each KV head serves a group of query heads"),
        AtMost("query_length", 8, because="a CTA holds all rows of a request and KV head"),
        AtMost("stages * tile_blocks", f"{LANES} * key_groups * {ROW_WARPS}", because="a lane brings a block to L2"),
        AtMost(
            f"(key_groups - 1) * {ROW_WARPS} * warp_tiles * {EXCHANGE_BYTES}",
            f"stages * tile_blocks * {BLOCK_BYTES}",
            because="key groups exchange their outputs in the ring",
        ),
    ),
    targets=TARGETS,
    kernel="kernel:paged_gqa_verify_attention",
    reference="reference:paged_gqa_verify_attention",
    early_reads=("block_table", "seq_lens"),
    triggers_early=True,
    cases=(
        *(_case(rows, heads, 0, splits) for heads in HEADS for rows in (7, 8) for splits in (1, 4)),
        *(_case(8, heads, 2048, splits) for heads in HEADS[:3] for splits in (4, 13)),
        *(_case(7, heads, 2048, 6) for heads in HEADS[:3]),
        *(_case(rows, heads, 64, splits) for heads in HEADS[3:] for rows in (7, 8) for splits in (1, 2)),
        *(_case(8, (16, 2), window, 33) for window in (0, 64, 2048)),
        *(_case(8, (16, 2), window, splits, requests=1) for window in (0, 2048) for splits in (64, 33, 1)),
        *(_case(8, (16, 2), window, 64, requests=1, blocks=LONG_BLOCKS) for window in (0, 2048)),
        *(
            _case(8, (16, 2), window, splits, requests=1, blocks=FULL_BLOCKS)
            for window, splits in ((0, 64), (2048, 33))
        ),
    ),
    instructions=("UTMALDG", "CCTL", "LDSM", "HMMA", "MUFU", "SYNCS", "ACQBULK"),
)


def serving(attention: "Attention", tp: int, query_length: int, sliding_window: int) -> Specialization:
    """What serves requests of `query_length` rows in a layer with this window (0: every key)."""
    return SPEC.specialize(axes=_sizes(query_length, *_heads(attention, tp)), statics=statics(sliding_window))


def num_splits(num_requests: int, num_kv_heads: int, query_length: int, sliding_window: int) -> int:
    """Over how many CTAs the keys of a request and KV head are split, so that all fill the multiprocessors once.

    Within a window as few as need no more tiles each: the partial results are what a split costs.
    """
    pairs = num_requests * num_kv_heads
    if not sliding_window:
        return max(1, FULL_CTAS // pairs)
    blocks = (sliding_window + query_length - 2) // BLOCK_SIZE + 2  # that the visible keys may touch
    tiles = -(-blocks // statics(sliding_window)["tile_blocks"])
    tiles_each = -(-tiles // max(1, WINDOW_CTAS // pairs))
    return -(-tiles // tiles_each)


def specializations(deployment: "Deployment") -> Iterator[Specialization]:
    """Layers with and without a window, of the backbone and of the draft; equal shapes are shared."""
    backbone, draft = deployment.backbone, deployment.draft
    found = (
        (length, *_heads(decoder.attention, deployment.tp), window)
        for decoder, length in ((backbone, deployment.query_length), (draft, draft.num_speculative_tokens))
        for window in _windows(decoder)
    )
    for *sizes, window in dict.fromkeys(found):
        yield SPEC.specialize(axes=_sizes(*sizes), statics=statics(window))


def _heads(attention: "Attention", tp: int) -> tuple[int, int]:
    return attention.query_heads(tp), attention.key_value_heads(tp)


def _windows(decoder: "Decoder") -> tuple[int, ...]:
    """0 if a layer sees every key, then the window if a layer has it."""
    full = len(decoder.full_attention_layers)
    return (0,) * (full > 0) + (decoder.attention.sliding_window,) * (full < decoder.num_hidden_layers)
