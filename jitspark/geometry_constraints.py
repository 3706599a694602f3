"""What a model geometry must satisfy beyond its types: each check yields the problems it sees.

The limits are those of the decode step that the kernels serve, not of the model family.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jitspark.geometry import Attention, Backbone, Decoder, Draft, Experts

HEAD_DIM = 64
BLOCK_SIZE = 16
NUM_SPECULATIVE_TOKENS = 7  # a verify step has 8 tokens a request: the n8 of the MMA
NVFP4_GROUP = 16  # elements that share one block scale; a rank's slice must not split a group


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken constraint: the field's path, its value, and what was needed with the reason."""

    field: str
    found: str
    needed: str


Problems = Iterator[Problem]


def backbone_problems(backbone: "Backbone", stem: str) -> Problems:
    """Problems of a backbone by itself; `stem` is its file's name without `.toml`."""
    yield from _decoder_problems(backbone, stem)
    yield from _ascending("tp_sizes", backbone.tp_sizes, None)
    if not backbone.tp_sizes:
        yield Problem("tp_sizes", "no TP size", "at least one")
    yield from _ascending("tap_layers", backbone.tap_layers, backbone.num_hidden_layers)
    yield from _expert_problems(backbone.experts, backbone.num_hidden_layers)
    yield from _shares("hidden_size", backbone.hidden_size, backbone.tp_sizes)
    yield from _decoder_shares(backbone, backbone.tp_sizes)
    yield from _expert_shares(backbone.experts, backbone.tp_sizes)


def draft_problems(draft: "Draft", stem: str) -> Problems:
    """Problems of a draft by itself."""
    yield from _decoder_problems(draft, stem)
    if draft.num_speculative_tokens != NUM_SPECULATIVE_TOKENS:
        yield Problem(
            "num_speculative_tokens",
            str(draft.num_speculative_tokens),
            f"{NUM_SPECULATIVE_TOKENS} (verify steps are 8 tokens a request)",
        )


def pair_problems(backbone: "Backbone", draft: "Draft") -> Problems:
    """Problems of a backbone with its draft, as seen from the backbone's file."""
    if len(backbone.tap_layers) != draft.num_taps:
        yield Problem(
            "tap_layers", f"{len(backbone.tap_layers)} taps", f"{draft.num_taps} (num_taps of the draft {draft.name})"
        )
    for mine, theirs, because in (
        ("hidden_size", "target_hidden_size", "the draft reads the backbone's stream"),
        ("hidden_size", "hidden_size", "the draft shares the backbone's token embedding"),
        ("vocab_size", "vocab_size", "the draft proposes the backbone's tokens"),
    ):
        found, needed = getattr(backbone, mine), getattr(draft, theirs)
        if found != needed:
            yield Problem(mine, str(found), f"{needed}, the {theirs} of the draft {draft.name} ({because})")
    for problem in _draft_shares(draft, backbone.tp_sizes):
        yield Problem(f"draft {draft.name}: {problem.field}", problem.found, problem.needed)


def _decoder_problems(model: "Decoder", stem: str) -> Problems:
    if model.name != stem:
        yield Problem("name", repr(model.name), f"{stem!r}, as the file is called")
    yield from _ascending("full_attention_layers", model.full_attention_layers, model.num_hidden_layers)
    yield from _ascending("nope_layers", model.nope_layers, model.num_hidden_layers)
    yield from _attention_problems(model.attention)
    yield from _position_problems(model)
    yield from _not_finite("", model)
    yield from _not_finite("attention.", model.attention)
    yield from _not_finite("norms.", model.norms)


def _attention_problems(attention: "Attention") -> Problems:
    heads, key_value_heads = attention.num_attention_heads, attention.num_key_value_heads
    if attention.head_dim != HEAD_DIM:
        yield Problem("attention.head_dim", str(attention.head_dim), f"{HEAD_DIM} (the kernels' head size)")
    if attention.block_size != BLOCK_SIZE:
        yield Problem("attention.block_size", str(attention.block_size), f"{BLOCK_SIZE} (the kernels' KV block size)")
    if heads % key_value_heads:
        yield Problem(
            "attention.num_attention_heads", str(heads), f"a multiple of num_key_value_heads={key_value_heads}"
        )


def _position_problems(model: "Decoder") -> Problems:
    layers, nope = model.num_hidden_layers, len(model.nope_layers)
    modes = {mode for mode, count in (("rope", layers - nope), ("nope", nope)) if count}
    given = model.attention.position_modes
    if not modes <= set(given):
        wanted = f"{' and '.join(sorted(modes))}, as nope_layers has {nope} of {layers} layers"
        yield Problem("attention.position_modes", repr(list(given)), wanted)
    if len(given) != len(set(given)):
        yield Problem("attention.position_modes", repr(list(given)), "each mode once")
    windowed = layers - len(model.full_attention_layers)
    if windowed and not model.attention.sliding_window:
        yield Problem("attention.sliding_window", "0", f"a window, as {windowed} layers are not full_attention_layers")


def _expert_problems(experts: "Experts", layers: int) -> Problems:
    yield from _ascending("experts.bf16_layers", experts.bf16_layers, layers)
    if experts.num_experts_per_tok > experts.num_local_experts:
        yield Problem(
            "experts.num_experts_per_tok",
            str(experts.num_experts_per_tok),
            f"at most num_local_experts={experts.num_local_experts}",
        )
    if experts.weight_dtype == "bfloat16" and experts.bf16_layers:
        yield Problem("experts.bf16_layers", repr(list(experts.bf16_layers)), "none, as all experts are bfloat16")


def _decoder_shares(model: "Decoder", tp_sizes: tuple[int, ...]) -> Problems:
    yield from _shares("attention.num_attention_heads", model.attention.num_attention_heads, tp_sizes)
    yield from _shares("attention.num_key_value_heads", model.attention.num_key_value_heads, tp_sizes)
    yield from _shares("vocab_size", model.vocab_size, tp_sizes)


def _expert_shares(experts: "Experts", tp_sizes: tuple[int, ...]) -> Problems:
    group = NVFP4_GROUP if experts.weight_dtype == "nvfp4" else 1
    yield from _shares("experts.num_local_experts", experts.num_local_experts, tp_sizes)
    yield from _shares("experts.moe_hidden_size", experts.moe_hidden_size, tp_sizes, group)
    yield from _shares("experts.moe_intermediate_size", experts.moe_intermediate_size, tp_sizes, group)


def _draft_shares(draft: "Draft", tp_sizes: tuple[int, ...]) -> Problems:
    yield from _decoder_shares(draft, tp_sizes)
    yield from _shares("intermediate_size", draft.intermediate_size, tp_sizes)


def _shares(field: str, size: int, tp_sizes: tuple[int, ...], unit: int = 1) -> Problems:
    for tp in tp_sizes:
        if size % (tp * unit):
            groups = f" in whole groups of {unit}" if unit > 1 else ""
            yield Problem(field, str(size), f"a size that TP {tp} of tp_sizes divides{groups}")


def _ascending(field: str, values: tuple[int, ...], layers: int | None) -> Problems:
    if list(values) != sorted(set(values)):
        yield Problem(field, repr(list(values)), "ascending values without repetition")
    if layers is not None and values and max(values) >= layers:
        yield Problem(field, f"layer {max(values)}", f"layers below num_hidden_layers={layers}")


def _not_finite(prefix: str, fields: object) -> Problems:
    for name in fields.__struct_fields__:  # type: ignore[attr-defined]  # every msgspec struct has it
        value = getattr(fields, name)
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(f"{prefix}{name}", repr(value), "a finite number")
