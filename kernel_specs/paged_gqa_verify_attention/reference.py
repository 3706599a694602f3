"""What `paged_gqa_verify_attention` computes, in float64 with the documented rounding point, and inputs that tempt it.

How a weight is rounded to BF16 depends on the value it is relative to; here that is the split's own maximum.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization

HEAD_DIM = 64
BLOCK_SIZE = 16
QK_NORM = 8.0  # the length of a query and of a key after their norm
SOFTMAX_SCALE = 0.6841258107984375
FULL_CONTEXT = 131072
# One request of each, as far as there are requests; a single request is as long as `length_alone` says.
LENGTHS = (8, 0, 2056, 15, 16, 17, 2047, 31, 2048, 0, 2049, 9, 71, 72, 73, 63, 64, 65, 1, 2063, 2064, 79, 1000, 2080)


def paged_gqa_verify_attention(
    qkvg: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    partial_max: Tensor,
    partial_sum: Tensor,
    partial_out: Tensor,
    softmax_scale: float,
    *,
    sliding_window: int,
    tile_blocks: int,
    **_: int,
) -> None:
    """Writes the partial results [num_tokens, num_heads, num_splits(, 64)] of every split."""
    num_requests, num_splits = len(seq_lens), partial_max.shape[-1]
    queries = qkvg[:, : partial_max.shape[1] * HEAD_DIM].double().view(num_requests, -1, partial_max.shape[1], HEAD_DIM)
    outputs = [each.view(num_requests, -1, *each.shape[1:]) for each in (partial_max, partial_sum, partial_out)]
    for request, seq_len in enumerate(seq_lens.tolist()):
        first, last = visible_blocks(seq_len, queries.shape[1], sliding_window)
        tiles = -(-(last - first) // tile_blocks)
        for split in range(num_splits):
            begin, end = (first + part * tiles // num_splits * tile_blocks for part in (split, split + 1))
            end = min(end, last)
            keys, values = gather(kv_cache, block_table[request, begin:end], begin, seq_len)
            positions = begin * BLOCK_SIZE + torch.arange(len(keys), device=keys.device)
            seen = visible(positions, seq_len, queries.shape[1], sliding_window)
            found = attend(queries[request], keys, values, seen, softmax_scale)
            for output, value in zip(outputs, found, strict=True):
                output[request, :, :, split] = value.transpose(0, 1)


def visible_blocks(seq_len: int, query_length: int, sliding_window: int) -> tuple[int, int]:
    """The first block with a key that a query sees, and the end of the last."""
    first_key = max(seq_len - query_length - sliding_window + 1, 0) if sliding_window else 0
    return first_key // BLOCK_SIZE, -(-seq_len // BLOCK_SIZE)


def gather(kv_cache: Tensor, blocks: Tensor, begin: int, seq_len: int) -> tuple[Tensor, Tensor]:
    """Keys and values [keys, kv heads, 64] of these blocks, which hold the keys from block `begin` on."""
    packed = kv_cache[blocks.long()].transpose(1, 2).flatten(0, 1)[: max(seq_len - begin * BLOCK_SIZE, 0)]
    keys, values = packed.chunk(2, dim=-1)
    return keys, values


def visible(positions: Tensor, seq_len: int, query_length: int, sliding_window: int) -> Tensor:
    """[query_length, keys]: which keys each query sees."""
    limits = seq_len - query_length + torch.arange(query_length, device=positions.device)[:, None]
    seen = positions <= limits
    return seen & (positions > limits - sliding_window) if sliding_window else seen


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Partial maximum, sum and output, heads first, of queries [queries, heads, 64] over a split's keys."""
    num_heads = queries.shape[1]
    if not len(keys):
        empty = queries.new_zeros(num_heads, len(queries))
        return empty - torch.inf, empty, queries.new_zeros(num_heads, len(queries), HEAD_DIM)
    unseen = ~seen.any(dim=0)[:, None, None]  # these may be NaN
    keys, values = (each.masked_fill(unseen, 0).double().transpose(0, 1) for each in (keys, values))
    keys, values = (each.repeat_interleave(num_heads // len(each), dim=0) for each in (keys, values))
    scores = (queries.transpose(0, 1) @ keys.transpose(1, 2)) * (softmax_scale * math.log2(math.e))
    scores = scores.masked_fill(~seen, -torch.inf)
    largest = scores.amax(dim=-1)
    weights = torch.exp2(scores - largest.masked_fill(largest == -torch.inf, 0.0)[..., None])
    return largest, weights.sum(dim=-1), weights.bfloat16().double() @ values


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Requests of `LENGTHS`, blocks in random order, and NaN wherever no query of the step may look.

    Block 0 is nobody's, and stands in every entry of the block table that must not be read. The cache is token-major
    (NHD) when `num_splits` is odd, head-major (HND) otherwise.
    """
    device = generator.device
    requests, query_length = axes["num_requests"], specialization.axes["query_length"]
    window = int(specialization.statics["sliding_window"])
    longest = axes["max_blocks"] * BLOCK_SIZE
    lengths = (
        [length_alone(longest)] if requests == 1 else [min(LENGTHS[i % len(LENGTHS)], longest) for i in range(requests)]
    )
    order = 1 + torch.randperm(axes["num_blocks"] - 1, generator=generator, device=device)
    table = torch.zeros((requests, axes["max_blocks"]), dtype=torch.int32, device=device)
    allowed = torch.zeros((axes["num_blocks"], BLOCK_SIZE), dtype=torch.bool, device=device)
    for request, seq_len in enumerate(lengths):
        first, last = visible_blocks(seq_len, query_length, window)
        blocks = order[request * axes["max_blocks"] :][: last - first]
        table[request, first:last] = blocks.int()
        positions = torch.arange(first * BLOCK_SIZE, last * BLOCK_SIZE, device=device)
        allowed[blocks] = visible(positions, seq_len, query_length, window).any(dim=0).view(-1, BLOCK_SIZE)
    return {
        "qkvg": _queries(specialization, axes["num_tokens"], generator),
        "kv_cache": _cache(allowed, specialization.axes["num_kv_heads"], axes["num_splits"], generator),
        "block_table": table,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
        "softmax_scale": SOFTMAX_SCALE,
    }


def length_alone(longest: int) -> int:
    """Of a single request whose row of the block table has room for `longest` keys: it ends within the last block, but
    the longest context ends with it.
    """
    return longest - (5 if longest < FULL_CONTEXT else 0)


def _queries(specialization: Specialization, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Normed queries, and NaN in the columns that are not theirs."""
    width = specialization.axes["num_heads"] * HEAD_DIM
    shape = (num_tokens, specialization.axes["qkvg_size"])
    qkvg = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=generator.device)
    normal = torch.randn((num_tokens, width // HEAD_DIM, HEAD_DIM), generator=generator, device=generator.device)
    qkvg[:, :width] = (QK_NORM * torch.nn.functional.normalize(normal, dim=-1)).flatten(1)
    return qkvg


def _cache(allowed: Tensor, num_kv_heads: int, num_splits: int, generator: torch.Generator) -> Tensor:
    """Normed keys and normal values [blocks, kv heads, 16, 128], with NaN in the tokens that are not `allowed`."""
    shape = (*allowed.shape, num_kv_heads, HEAD_DIM)
    keys, values = (torch.randn(shape, generator=generator, device=generator.device) for _ in range(2))
    packed = torch.cat((QK_NORM * torch.nn.functional.normalize(keys, dim=-1), values), dim=-1)
    packed = packed.masked_fill(~allowed[..., None, None], torch.nan).bfloat16()
    return packed.transpose(1, 2) if num_splits % 2 else packed.transpose(1, 2).contiguous()
