"""Model geometries as data: `kernel_specs/geometry/*.toml`, validated, frozen, with per-rank shapes.

A backbone geometry names its draft; `deployment()` gives both. Every kernel spec derives the shapes it must
serve from these values and a TP size, so adding a model means adding TOML files. What a geometry must satisfy
beyond its types is in `geometry_constraints`.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from jitspark import geometry_constraints, geometry_file
from jitspark.errors import GeometryError

GEOMETRY_DIR = Path(__file__).resolve().parent.parent / "kernel_specs" / "geometry"
DEFAULT_GEOMETRY = "muse_spark_open"

# The step serves R = 1..8 requests: M = 8R backbone rows (one verify step each), 7R draft rows, 8R context rows.
MAX_REQUESTS = 8

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=100)]
# sizes enter kernels as 32-bit integers
Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Index = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
PositionMode = Literal["rope", "nope"]
WeightDtype = Literal["nvfp4", "bfloat16"]


class Attention(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Attention heads and positions.

    `sliding_window` counts keys, the query's own included; 0 when no layer has a window. `position_modes` are
    the modes to serve: those of the model's layers, and more where a checkpoint's are not known. `block_size` is
    the KV cache's, in tokens.
    """

    num_attention_heads: Size
    num_key_value_heads: Size
    head_dim: Size
    sliding_window: Index
    rope_theta: Positive
    position_modes: tuple[PositionMode, ...]
    block_size: Size

    def query_heads(self, tp: int) -> int:
        return self.num_attention_heads // tp

    def key_value_heads(self, tp: int) -> int:
        return self.num_key_value_heads // tp

    def query_width(self, tp: int) -> int:
        """Columns of a rank's queries, of its output gate and of its attention output: the K of o_proj."""
        return self.query_heads(tp) * self.head_dim

    def key_value_width(self, tp: int) -> int:
        """Columns of a rank's keys; its values have as many."""
        return self.key_value_heads(tp) * self.head_dim

    def qkv_gate_width(self, tp: int) -> int:
        """Columns of a rank's fused projection, in the order [q, k, v, gate]."""
        return 2 * self.query_width(tp) + 2 * self.key_value_width(tp)


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The routed experts of a mixture-of-experts layer. `bf16_layers` keep BF16 experts in an NVFP4 checkpoint."""

    num_local_experts: Size
    num_experts_per_tok: Size
    moe_hidden_size: Size
    moe_intermediate_size: Size
    weight_dtype: WeightDtype
    bf16_layers: tuple[Index, ...]

    def intermediate_width(self, tp: int) -> int:
        """A rank's share of each expert's FFN under expert tensor parallelism."""
        return self.moe_intermediate_size // tp


class Norms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Epsilons: `post_norm_eps` for the norms after attention, FFN and experts, `rms_norm_eps` for all others."""

    rms_norm_eps: Positive
    post_norm_eps: Positive


class Decoder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a backbone and a draft have in common.

    Layers outside `full_attention_layers` see a sliding window, layers outside `nope_layers` use RoPE. The
    softmax scale is qk_scale_factor / sqrt(head_dim); logits are cap * tanh(logits * output_multiplier / cap).
    """

    name: Name
    hidden_size: Size
    num_hidden_layers: Size
    vocab_size: Size
    full_attention_layers: tuple[Index, ...]
    nope_layers: tuple[Index, ...]
    qk_scale_factor: Positive
    residual_gate_temperature: Positive
    output_multiplier: Positive
    final_logit_softcapping: Positive
    attention: Attention
    norms: Norms

    def vocab_rows(self, tp: int) -> int:
        """Rows of a rank's lm_head shard."""
        return self.vocab_size // tp


class Backbone(Decoder, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="backbone"):
    """The target model of a deployment. `tap_layers` are the layers whose output the draft reads."""

    tp_sizes: tuple[Size, ...]
    draft: Name
    max_position_embeddings: Size
    tap_layers: tuple[Index, ...]
    experts: Experts


class Draft(Decoder, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind", tag="draft"):
    """The DSpark draft that proposes for a backbone."""

    intermediate_size: Size
    target_hidden_size: Size
    num_taps: Size
    num_speculative_tokens: Size
    markov_rank: Size

    @property
    def fc_width(self) -> int:
        """Columns of the fc input: the tapped streams side by side."""
        return self.num_taps * self.target_hidden_size

    def intermediate_width(self, tp: int) -> int:
        """A rank's share of the dense FFN."""
        return self.intermediate_size // tp


class Deployment(msgspec.Struct, frozen=True):
    """A backbone, its draft and a TP size: everything that fixes which kernels a worker asks for."""

    backbone: Backbone
    draft: Draft
    tp: int

    @property
    def query_length(self) -> int:
        """Tokens of one request in a verify step: its last token and the proposed ones."""
        return 1 + self.draft.num_speculative_tokens

    @property
    def backbone_rows(self) -> tuple[int, ...]:
        """M of each decode step that is served: 8, 16, ..., 64."""
        return tuple(requests * self.query_length for requests in range(1, MAX_REQUESTS + 1))

    @property
    def draft_context_rows(self) -> tuple[int, ...]:
        """Rows whose keys and values the draft takes over from each such step: as many."""
        return self.backbone_rows

    @property
    def draft_query_rows(self) -> tuple[int, ...]:
        """Rows of the draft's own forward: 7, 14, ..., 56."""
        return tuple(requests * self.draft.num_speculative_tokens for requests in range(1, MAX_REQUESTS + 1))


def geometry_names() -> tuple[str, ...]:
    """The built-in backbones, sorted."""
    kinds = {path.stem: geometry_file.read(path, _shown(path)).get("kind") for path in GEOMETRY_DIR.glob("*.toml")}
    return tuple(sorted(name for name, kind in kinds.items() if kind == "backbone"))


def load_geometry(name_or_path: str | Path) -> Backbone:
    """The backbone of a built-in name or of a TOML file (anything with a `/` or ending in `.toml`).

    Its draft and every TP size it allows are checked too. Raises GeometryError for the first problem.
    """
    return _load_pair(name_or_path)[0]


def load_draft(name: str, beside: Path | None = None) -> Draft:
    """The draft that the backbone file `beside` names: `<name>.toml` in its folder if there is one, else a
    built-in, as without `beside`. Raises GeometryError.
    """
    path = _locate_draft(name, beside)
    draft = geometry_file.load(path, _shown(path), Draft)
    _refuse(path, geometry_constraints.draft_problems(draft, path.stem))
    return draft


def deployment(name_or_path: str | Path, tp: int) -> Deployment:
    """The deployment of a geometry at a TP size. Raises GeometryError, also when the size is not allowed."""
    backbone, draft = _load_pair(name_or_path)
    if tp not in backbone.tp_sizes:
        raise GeometryError(
            where=f"{name_or_path}: tp_sizes",
            found=f"TP {tp}",
            needed=f"one of {', '.join(map(str, backbone.tp_sizes))}",
            remedy="Ask for one of these sizes, or use a geometry that allows yours.",
        )
    return Deployment(backbone, draft, tp)


def _load_pair(name_or_path: str | Path) -> tuple[Backbone, Draft]:
    path = _locate(name_or_path)
    backbone = geometry_file.load(path, _shown(path), Backbone)
    _refuse(path, geometry_constraints.backbone_problems(backbone, path.stem))
    draft = load_draft(backbone.draft, beside=path)
    _refuse(path, geometry_constraints.pair_problems(backbone, draft))
    return backbone, draft


def _locate(name_or_path: str | Path) -> Path:
    text = str(name_or_path)
    if isinstance(name_or_path, Path) or "/" in text or text.endswith(".toml"):
        return Path(name_or_path)
    if text not in geometry_names():
        raise GeometryError(
            where="--geometry",
            found=f"unknown geometry {text!r}",
            needed=f"one of {', '.join(geometry_names())}, or the path of a TOML file",
            remedy="Name a built-in geometry, or give a path with a `/` or ending in `.toml`.",
        )
    return GEOMETRY_DIR / f"{text}.toml"


def _locate_draft(name: str, beside: Path | None) -> Path:
    folders = (GEOMETRY_DIR,) if beside is None else (beside.parent, GEOMETRY_DIR)
    path = next((found for folder in folders if (found := folder / f"{name}.toml").is_file()), None)
    if path is None:
        raise GeometryError(
            where="draft" if beside is None else f"{_shown(beside)}: draft",
            found=f"unknown draft {name!r}",
            needed=f"{name}.toml beside the backbone's file or among the built-in geometries",
            remedy="Correct the name, or add that file.",
        )
    return path


def _shown(path: Path) -> str:
    """Built-in files by their place in the repository, others as the user wrote them."""
    return f"kernel_specs/geometry/{path.name}" if path.parent == GEOMETRY_DIR else str(path)


def _refuse(path: Path, problems: geometry_constraints.Problems) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise GeometryError(
            where=f"{_shown(path)}: {problem.field}",
            found=problem.found,
            needed=problem.needed,
            remedy="Correct this field, or the one it must agree with.",
        )
