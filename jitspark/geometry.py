"""Model geometries as data: `kernel_specs/geometry/*.toml`, validated, frozen, with per-rank shapes.

A backbone geometry names its draft; `deployment()` gives both. Every kernel spec derives the shapes it must
serve from these values and a TP size, so adding a model means adding one TOML file.
"""

import functools
import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from jitspark.errors import GeometryError

GEOMETRY_DIR = Path(__file__).resolve().parent.parent / "kernel_specs" / "geometry"
DEFAULT_GEOMETRY = "muse_spark_open"

# The step serves R = 1..8 requests: M = 8R backbone rows (one verify step each), 7R draft rows, 8R context rows.
MAX_REQUESTS = 8


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Attention heads and positions. `full_attention_layers` are NoPE and see all keys; the others use RoPE
    and a window of `sliding_window` keys including the query's own."""

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    sliding_window: int
    rope_theta: float
    position_modes: tuple[Literal["rope", "nope"], ...]
    block_size: int


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The routed experts of a mixture-of-experts layer."""

    num_local_experts: int
    num_experts_per_tok: int
    moe_hidden_size: int
    moe_intermediate_size: int
    weight_dtype: Literal["nvfp4", "bfloat16"]
    bf16_layers: tuple[int, ...]


class Norms(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    rms_norm_eps: float
    post_norm_eps: float


class Backbone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target model of a deployment."""

    name: str
    tp_sizes: tuple[int, ...]
    draft: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    full_attention_layers: tuple[int, ...]
    tap_layers: tuple[int, ...]
    qk_scale_factor: float
    residual_gate_temperature: float
    output_multiplier: float
    final_logit_softcapping: float
    attention: Attention
    experts: Experts
    norms: Norms


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The DSpark draft that proposes for a backbone."""

    name: str
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    target_hidden_size: int
    num_taps: int
    num_speculative_tokens: int
    markov_rank: int
    attention: Attention
    norms: Norms


class Deployment(msgspec.Struct, frozen=True):
    """A backbone, its draft and a TP size: everything that fixes which kernels a worker asks for."""

    backbone: Backbone
    draft: Draft
    tp: int
