"""Whether a draft's config.json is one that the kernels serve: its switches, and its sizes against the geometry's.

Refuses with one UsageError that names the field. What may differ from the geometry, because it enters no kernel, is
taken from the model: epsilons, the softmax scale and the position mode.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jitspark.errors import UsageError

if TYPE_CHECKING:
    from jitspark.geometry import Draft

# Switches of the class that the kernels have built in: another value is another computation.
SWITCHES: Mapping[str, Any] = {
    "norm_affine": True,
    "post_norm_affine": False,
    "norm_zero_centered_gamma": True,
    "post_norm_gain_center_type": "one",
    "use_ffn_learnable_scales": True,
    "use_qk_norm": True,
    "use_attn_o_norm": True,
    "use_attn_o_gate": True,
    "use_residual_gate": True,
    "rope_use_fp32_in_outer_product": True,
    "attn_temperature_tuning_layers": None,
}


@dataclass(frozen=True, slots=True)
class Field:
    """A field of config.json that is not what the kernels need."""

    name: str
    found: Any
    needed: Any


def check(model: Any, draft: "Draft") -> None:
    """Raises UsageError for the first field of the draft's config that no kernel serves. `model`: the inner model."""
    _refuse(next(differences(model, draft), None))


def check_sizes(config: Any, draft: "Draft") -> None:
    """As `check`, of the sizes alone and before the model is built: wrong ones end in vLLM's weight loader, unnamed."""
    _refuse(next(_different(config, _sizes(draft)), None))


def _refuse(field: Field | None) -> None:
    if field is not None:
        raise UsageError(
            where=f"the draft's config.json: {field.name}",
            found=repr(field.found),
            needed=f"{field.needed!r}, which the specialized draft is made for",
            remedy="Run this draft with stock vLLM (decode_backend auto), or with a geometry of its own.",
        )


def differences(model: Any, draft: "Draft") -> Iterator[Field]:
    """Every such field, switches first."""
    config = model.config
    yield from _different(config, {**SWITCHES, **_sizes(draft)})
    if str(config.residual_dtype) != "torch.float32":
        yield Field("residual_dtype", str(config.residual_dtype), "fp32")
    if config.moe.is_enabled:
        yield Field("moe.is_enabled", found=True, needed=False)
    if len(config.target_layer_ids) != draft.num_taps:
        yield Field("target_layer_ids", list(config.target_layer_ids), f"{draft.num_taps} layers")
    mode = "rope" if config.use_rope else "nope"
    if mode not in draft.attention.position_modes:
        yield Field("draft_position_mode", mode, draft.attention.position_modes[0])
    yield from _windows(model, draft)


def _different(config: Any, wanted: Mapping[str, Any]) -> Iterator[Field]:
    for name, needed in wanted.items():
        found = getattr(config, name, None)
        if found != needed:
            yield Field(name, found, needed)


def as_loaded(model: Any, draft: "Draft") -> "Draft":
    """The geometry with the loaded model's own epsilons and softmax scale."""
    from msgspec.structs import replace

    config, attention = model.config, model.layers[0].self_attn
    post = config.rms_post_norm_eps or config.rms_norm_eps
    norms = replace(draft.norms, rms_norm_eps=config.rms_norm_eps, post_norm_eps=post)
    factor = attention.scaling * math.sqrt(draft.attention.head_dim)
    return replace(draft, norms=norms, qk_scale_factor=factor)


def _sizes(draft: "Draft") -> dict[str, int]:
    attention = draft.attention
    return {
        "hidden_size": draft.hidden_size,
        "vocab_size": draft.vocab_size,
        "num_hidden_layers": draft.num_hidden_layers,
        "intermediate_size_mlp": draft.intermediate_size,
        "target_hidden_size": draft.target_hidden_size,
        "num_attention_heads": attention.num_attention_heads,
        "num_key_value_heads": attention.num_key_value_heads,
        "head_dim": attention.head_dim,
    }


def _windows(model: Any, draft: "Draft") -> Iterator[Field]:
    """The windows that vLLM made of `global_attn_cfg`, by layer; 0 where a layer sees every key."""
    found = [layer.self_attn.attn.sliding_window or 0 for layer in model.layers]
    window, full = draft.attention.sliding_window, draft.full_attention_layers
    needed = [0 if layer in full else window for layer in range(draft.num_hidden_layers)]
    if found != needed:
        yield Field("global_attn_cfg", found, needed)
