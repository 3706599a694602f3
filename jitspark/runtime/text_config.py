"""A backbone geometry in the words of a Hugging Face text config, and the fields in which a config differs from it.

The names are those of transformers' MuseSparkTextConfig, which vLLM's class of the same name keeps.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jitspark.geometry import Backbone

# Floats are used in FP32 or narrower, and config files differ in the last digits that they write: 2 ** -2.5 is
# 0.17677669529663687 in one and 0.1767766952966369 in another.
FLOAT_TOLERANCE = 1e-7

SAME_NAME = (
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "qk_scale_factor",
    "residual_gate_temperature",
    "output_multiplier",
    "final_logit_softcapping",
)
ATTENTION = ("num_attention_heads", "num_key_value_heads", "head_dim")
EXPERTS = ("num_local_experts", "num_experts_per_tok", "moe_hidden_size", "moe_intermediate_size")
NORMS = ("rms_norm_eps", "post_norm_eps")


@dataclass(frozen=True, slots=True)
class Difference:
    """One field of a text config that is not what a geometry says. `field` names the layer too in a list by layer."""

    field: str
    found: Any
    needed: Any

    def __str__(self) -> str:
        return f"{self.field} is {self.found!r}, not {self.needed!r}"


def text_config_values(backbone: Backbone) -> Mapping[str, Any]:
    """What the text config of a model of this geometry must hold, by field.

    Everything that a plan compiles in or assumes and that a text config can show. Left out are what the config
    does not know (TP sizes, taps, expert weight dtypes) and what does not change a step (context limit, token
    ids). Values by layer are lists, as in a config.
    """
    values = {name: getattr(backbone, name) for name in SAME_NAME}
    values |= {name: getattr(backbone.attention, name) for name in ATTENTION}
    values |= {name: getattr(backbone.experts, name) for name in EXPERTS}
    values |= {name: getattr(backbone.norms, name) for name in NORMS}
    return MappingProxyType(values | _schedule(backbone) | _assumed(backbone))


def differences(text_config: Any, values: Mapping[str, Any]) -> Iterator[Difference]:
    """The fields of `text_config` that do not hold these values, in their order; a missing field counts as None."""
    for field, needed in values.items():
        found = getattr(text_config, field, None)
        if not _equal(found, needed):
            yield _first_item(field, found, needed)


def _schedule(backbone: Backbone) -> dict[str, Any]:
    layers = range(backbone.num_hidden_layers)
    full, nope = backbone.full_attention_layers, backbone.nope_layers
    schedule: dict[str, Any] = {
        "layer_types": ["full_attention" if layer in full else "sliding_attention" for layer in layers],
        "layer_rope_theta": [0.0 if layer in nope else backbone.attention.rope_theta for layer in layers],
    }
    if len(full) < len(layers):
        schedule["sliding_window"] = backbone.attention.sliding_window
    return schedule


def _assumed(backbone: Backbone) -> dict[str, Any]:
    """What every plan takes for granted: experts in each layer, and routing weights that are not scaled."""
    return {"mlp_layer_types": ["sparse"] * backbone.num_hidden_layers, "routed_scaling_factor": 1.0}


def _equal(found: Any, needed: Any) -> bool:
    if isinstance(needed, list):
        same_length = isinstance(found, (list, tuple)) and len(found) == len(needed)
        return same_length and all(map(_equal, found, needed))
    if isinstance(needed, float):
        return isinstance(found, (int, float)) and math.isclose(found, needed, rel_tol=FLOAT_TOLERANCE)
    return bool(found == needed)


def _first_item(field: str, found: Any, needed: Any) -> Difference:
    """In a list, the first layer that differs: the whole of two long lists tells a reader nothing."""
    if isinstance(needed, list) and isinstance(found, (list, tuple)):
        if len(found) != len(needed):
            return Difference(f"the length of {field}", len(found), len(needed))
        layer = next(layer for layer, pair in enumerate(zip(found, needed, strict=True)) if not _equal(*pair))
        return Difference(f"{field}[{layer}]", found[layer], needed[layer])
    return Difference(field, found, needed)
