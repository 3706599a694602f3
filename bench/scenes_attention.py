"""Attention of a verify step and the merge of its splits, over a paged cache that does not fit the L2 cache."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import stock
from bench.scene import OURS, Call, Scene, beyond, contenders, in_turn, relative_error
from bench.workload import rotation_bytes

BLOCK = 16
HEAD = 64
SCALE = 0.6841258107984375
EPS = 1e-5
MAX_SETS = 256
BOUND = 0.01  # relative error of FA3 against ours: both round weights and outputs to BF16

Kernel = Callable[..., Any]
Values = Mapping[str, Any]


def build(part: Values, kernels: Mapping[str, Kernel], generator: torch.Generator) -> Scene:
    """`part` from `bench.step_parts`; `kernels` by role: attention, combine."""
    axes, statics = part["launches"]["attention"]["axes"], part["launches"]["attention"]["statics"]
    window = statics["sliding_window"]
    sets = _sets(part, axes, window, generator)
    ours = [in_turn(*_calls(values, kernels)) for values in sets]
    queries = [_queries(values, axes) for values in sets]
    found, absent = contenders({"FA3, without norm and gate": partial(_flash, sets, queries, window)})
    wrong = {}
    if found:
        ours[0]()
        next(iter(found.values()))[0]()
        want = _normed_and_gated(sets[0]["flash_out"], sets[0]["qkvg"], axes)
        wrong = beyond(OURS, relative_error(sets[0]["out"], want), BOUND)
    moved = _moved(part, axes, window)
    return Scene(moved, {OURS: ours, **found}, wrong, absent=absent)


def _sets(part: Values, axes: Values, window: int, generator: torch.Generator) -> list[Values]:
    """Argument sets, each with cache blocks of its own in random order."""
    device, sizes = generator.device, part["sizes"]
    requests, context = sizes["num_requests"], sizes["context"]
    width = context // BLOCK
    first = max(context - axes["query_length"] - window + 1, 0) // BLOCK if window else 0
    per_set = requests * (width - first)
    block_bytes = axes["num_kv_heads"] * BLOCK * 2 * HEAD * 2
    count = min(MAX_SETS, max(2, -(-rotation_bytes() // (per_set * block_bytes))))
    blocks = count * per_set + 1
    cache = torch.empty((blocks, axes["num_kv_heads"], BLOCK, 2 * HEAD), dtype=torch.bfloat16, device=device)
    cache.normal_(generator=generator)
    order = 1 + torch.randperm(blocks - 1, generator=generator, device=device)
    made = []
    for number in range(count):
        table = torch.zeros((requests, width), dtype=torch.int32, device=device)
        table[:, first:] = order[number * per_set :][:per_set].view(requests, -1).int()
        made.append(_values(part, axes, cache, table, generator))
    return made


def _values(part: Values, axes: Values, cache: Tensor, table: Tensor, generator: torch.Generator) -> Values:
    device, tokens, heads = generator.device, part["num_tokens"], axes["num_heads"]
    splits = part["sizes"]["num_splits"]
    qkvg = torch.randn((tokens, axes["qkvg_size"]), generator=generator, device=device).mul_(0.5).bfloat16()
    lengths = torch.full((len(table),), part["sizes"]["context"], dtype=torch.int32, device=device)
    return {
        "qkvg": qkvg,
        "kv_cache": cache,
        "block_table": table,
        "seq_lens": lengths,
        "partial_max": torch.empty((tokens, heads, splits), device=device),
        "partial_sum": torch.empty((tokens, heads, splits), device=device),
        "partial_out": torch.empty((tokens, heads, splits, HEAD), device=device),
        "out": torch.empty((tokens, heads * HEAD), dtype=torch.bfloat16, device=device),
        "flash_out": torch.empty((tokens, heads, HEAD), dtype=torch.bfloat16, device=device),
    }


def _calls(values: Values, kernels: Mapping[str, Kernel]) -> Sequence[Call]:
    partials = [values[name] for name in ("partial_max", "partial_sum", "partial_out")]
    inputs = [values[name] for name in ("qkvg", "kv_cache", "block_table", "seq_lens")]
    made: list[Call] = [partial(kernels["attention"], *inputs, *partials, SCALE)]
    if "combine" in kernels:
        made.append(partial(kernels["combine"], *partials, values["qkvg"], values["out"], EPS))
    return made


def _queries(values: Values, axes: Values) -> Tensor:
    width = axes["num_heads"] * HEAD
    view: Tensor = values["qkvg"][:, :width].view(-1, axes["num_heads"], HEAD)
    return view


def _flash(sets: Sequence[Values], queries: Sequence[Tensor], window: int) -> Sequence[Call]:
    return [
        stock.flash_attention(
            query,
            values["kv_cache"],
            values["block_table"],
            values["seq_lens"],
            values["flash_out"],
            SCALE,
            window,
        )
        for values, query in zip(sets, queries, strict=True)
    ]


def _normed_and_gated(attended: Tensor, qkvg: Tensor, axes: Values) -> Tensor:
    """What the combine makes of an attention output."""
    value = attended.double()
    gate = qkvg[:, -axes["num_heads"] * HEAD :].double()
    normed = value * torch.rsqrt(value.square().mean(dim=-1, keepdim=True) + EPS)
    return normed.flatten(1) * torch.sigmoid(gate)


def _moved(part: Values, axes: Values, window: int) -> int:
    """Visible keys and values once; queries, gates and outputs."""
    context = part["sizes"]["context"]
    keys = min(context, window + axes["query_length"] - 1) if window else context
    cache = part["sizes"]["num_requests"] * keys * axes["num_kv_heads"] * 2 * HEAD * 2
    rows = int(part["num_tokens"] * axes["num_heads"] * HEAD * 2)
    return int(cache) + 3 * rows
