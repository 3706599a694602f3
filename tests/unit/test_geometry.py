"""Geometries: the numbers of the built-in ones, and one error for whatever is wrong with a file."""

import os
import re
from fractions import Fraction
from unittest.mock import Mock, patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitspark import geometry_file
from jitspark.errors import GeometryError
from jitspark.geometry import GEOMETRY_DIR, deployment, geometry_names, load_draft, load_geometry

ALLOWED = [(name, tp) for name in geometry_names() for tp in load_geometry(name).tp_sizes]


@pytest.fixture
def tiny(tmp_path):
    """A copy of the tiny backbone; call with (old, new) texts to edit it, then its path is returned."""
    path = tmp_path / "tiny.toml"

    def edit(*changes):
        text = (GEOMETRY_DIR / "tiny.toml").read_text(encoding="utf-8")
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        path.write_text(text, encoding="utf-8")
        return path

    return edit


def refusal(name_or_path):
    with pytest.raises(GeometryError) as caught:
        load_geometry(name_or_path)
    # neither library's error hangs on to ours as a second traceback
    assert caught.value.__cause__ is None
    return caught.value


def test_the_built_in_backbones():
    assert geometry_names() == ("muse_spark_open", "tiny", "tiny_swa")


@pytest.mark.parametrize(
    ("tp", "qkv_gate", "o_proj", "lm_head", "gate_up"),
    [(4, 4608, 2048, 50512, 8192), (8, 2304, 1024, 25256, 4096), (16, 1152, 512, 12628, 2048)],
)
def test_muse_spark_shapes_of_a_rank(tp, qkv_gate, o_proj, lm_head, gate_up):
    made = deployment("muse_spark_open", tp)
    attention = made.backbone.attention

    assert (attention.qkv_gate_width(tp), attention.query_width(tp)) == (qkv_gate, o_proj)
    assert made.backbone.vocab_rows(tp) == made.draft.vocab_rows(tp) == lm_head
    assert (2 * made.draft.intermediate_width(tp), made.draft.fc_width) == (gate_up, 40960)


def test_muse_spark_layers_follow_the_schedule():
    backbone = load_geometry("muse_spark_open")

    assert list(backbone.full_attention_layers) == [i for i in range(62) if (61 - i) % 4 == 0]
    assert backbone.nope_layers == backbone.full_attention_layers


def test_muse_spark_parameters_add_up_to_816_billion():
    model = load_geometry("muse_spark_open")
    experts, hidden = model.experts, model.hidden_size
    attention = hidden * (model.attention.qkv_gate_width(1) + model.attention.query_width(1))
    layer = attention + 2 * hidden * experts.moe_hidden_size + experts.num_local_experts * hidden
    routed = 3 * experts.num_local_experts * experts.moe_hidden_size * experts.moe_intermediate_size
    total = model.num_hidden_layers * (layer + routed) + 2 * model.vocab_size * hidden

    assert round(total / 1e9) == 820  # the name counts without the token tables of 2 x 1.66e9
    assert round((total - 2 * model.vocab_size * hidden) / 1e9) == 817


def test_draft_checkpoint_is_10_6_gigabytes():
    draft = load_draft("muse_spark_dspark")
    hidden = draft.hidden_size
    attention = hidden * (draft.attention.qkv_gate_width(1) + draft.attention.query_width(1))
    layers = draft.num_hidden_layers * (attention + 3 * hidden * draft.intermediate_size)
    heads = draft.vocab_size * (hidden + 2 * draft.markov_rank)

    assert round(2 * (hidden * draft.fc_width + layers + heads) / 1e9, 1) == 10.6


def test_rows_of_the_decode_step():
    made = deployment("muse_spark_open", 8)

    assert made.query_length == 8
    assert made.backbone_rows == made.draft_context_rows == (8, 16, 24, 32, 40, 48, 56, 64)
    assert made.draft_query_rows == (7, 14, 21, 28, 35, 42, 49, 56)


def test_tiny_pair_differs_only_in_its_layer_schedule():
    plain, sliding = load_geometry("tiny"), load_geometry("tiny_swa")

    assert (plain.full_attention_layers, plain.nope_layers) == ((0, 1, 2, 3), ())
    assert (sliding.full_attention_layers, sliding.nope_layers) == ((3,), (3,))
    assert plain.experts == sliding.experts
    assert plain.tap_layers == sliding.tap_layers == (0, 2, 3)


@pytest.mark.parametrize(("name", "tp"), ALLOWED)
def test_every_allowed_tp_divides_exactly(name, tp):
    made = deployment(name, tp)
    sizes = [
        made.backbone.hidden_size,
        made.backbone.vocab_size,
        made.backbone.attention.num_key_value_heads,
        made.backbone.experts.num_local_experts,
        made.draft.intermediate_size,
    ]

    assert all(Fraction(size, tp).denominator == 1 for size in sizes)


@pytest.mark.parametrize("path", sorted(GEOMETRY_DIR.glob("*.toml")), ids=lambda path: path.stem)
def test_every_number_says_where_it_comes_from(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    silent = [
        line
        for number, line in enumerate(lines)
        if re.search(r"= *[\[\d]", line) and "#" not in line and not lines[number - 1].startswith("# ")
    ]

    assert not silent


@pytest.mark.parametrize("tp", [0, 1, 2, 3, 32, -8])
def test_a_tp_size_that_is_not_allowed(tp):
    with pytest.raises(GeometryError) as caught:
        deployment("muse_spark_open", tp)

    assert caught.value.found == f"TP {tp}"
    assert caught.value.needed == "one of 4, 8, 16"


@pytest.mark.parametrize("name", ["nix", "muse_spark_dspark", "", "tiny\0"])
def test_an_unknown_name_lists_the_known_ones(name):
    error = refusal(name)

    assert error.found == f"unknown geometry {name!r}"
    assert "muse_spark_open, tiny, tiny_swa" in error.needed


WRONG = {
    "missing field": (("vocab_size = 2048", ""), "vocab_size", "no such field"),
    "missing nested field": (("head_dim = 64", ""), "attention.head_dim", "no such field"),
    "missing table": (("[norms]", "[norm]"), "norm", "an unknown field"),
    "unknown field": (("vocab_size", "vocabulary"), "vocabulary", "an unknown field"),
    "text for a number": (("vocab_size = 2048", 'vocab_size = "2048"'), "vocab_size", "the value '2048'"),
    "fraction": (("vocab_size = 2048", "vocab_size = 2048.5"), "vocab_size", "the value 2048.5"),
    "truth value": (("vocab_size = 2048", "vocab_size = true"), "vocab_size", "the value True"),
    "negative": (("vocab_size = 2048", "vocab_size = -2048"), "vocab_size", "the value -2048"),
    "zero": (("hidden_size = 512", "hidden_size = 0"), "hidden_size", "the value 0"),
    "beyond 32 bits": (
        ("hidden_size = 512", "hidden_size = 4294967296"),
        "hidden_size",
        "the value 4294967296",
    ),
    "no choice": (('["rope"]', '["yarn"]'), "attention.position_modes[0]", "the value 'yarn'"),
    "infinite": (("rms_norm_eps = 1e-5", "rms_norm_eps = inf"), "norms.rms_norm_eps", "inf"),
    "no number": (("rms_norm_eps = 1e-5", "rms_norm_eps = nan"), "norms.rms_norm_eps", "the value nan"),
    "a draft": (('kind = "backbone"', 'kind = "draft"'), "kind", "the value 'draft'"),
    "no kind": (('kind = "backbone"', ""), "kind", "no such field"),
    "another file's name": (('name = "tiny"', 'name = "other"'), "name", "'other'"),
    "head size": (("head_dim = 64", "head_dim = 128"), "attention.head_dim", "128"),
    "KV block size": (("block_size = 16", "block_size = 32"), "attention.block_size", "32"),
    "GQA groups": (("num_attention_heads = 8", "num_attention_heads = 9"), "attention.num_attention_heads", "9"),
    "TP and KV heads": (("tp_sizes = [1, 2]", "tp_sizes = [1, 4]"), "attention.num_key_value_heads", "2"),
    "TP and vocabulary": (("vocab_size = 2048", "vocab_size = 2047"), "vocab_size", "2047"),
    "no TP": (("tp_sizes = [1, 2]", "tp_sizes = []"), "tp_sizes", "no TP size"),
    "repeated TP": (("tp_sizes = [1, 2]", "tp_sizes = [1, 1]"), "tp_sizes", "[1, 1]"),
    "tap out of range": (("tap_layers = [0, 2, 3]", "tap_layers = [0, 2, 4]"), "tap_layers", "layer 4"),
    "taps too few": (("tap_layers = [0, 2, 3]", "tap_layers = [0, 2]"), "tap_layers", "2 taps"),
    "taps out of order": (("tap_layers = [0, 2, 3]", "tap_layers = [2, 0, 3]"), "tap_layers", "[2, 0, 3]"),
    "layer out of range": (("nope_layers = []", "nope_layers = [7]"), "nope_layers", "layer 7"),
    "positions and layers": (("nope_layers = []", "nope_layers = [1]"), "attention.position_modes", "['rope']"),
    "no window": (
        (("sliding_window = 64", "sliding_window = 0"), ("_layers = [0, 1, 2, 3]", "_layers = [3]")),
        "attention.sliding_window",
        "0",
    ),
    "BF16 exceptions": (("bf16_layers = []", "bf16_layers = [0]"), "experts.bf16_layers", "[0]"),
    "more experts than there are": (
        ("num_experts_per_tok = 2", "num_experts_per_tok = 9"),
        "experts.num_experts_per_tok",
        "9",
    ),
    "unknown draft": (('"tiny_dspark"', '"nix"'), "draft", "unknown draft 'nix'"),
    "draft outside its folder": (('"tiny_dspark"', '"../tiny_dspark"'), "draft", "the value '../tiny_dspark'"),
    "draft of another model": (('"tiny_dspark"', '"muse_spark_dspark"'), "tap_layers", "3 taps"),
}


@pytest.mark.parametrize(("change", "field", "found"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_field_is_one_error_with_its_path(tiny, change, field, found):
    path = tiny(*([change] if isinstance(change[0], str) else change))

    error = refusal(path)

    assert (error.where, error.found) == (f"{path}: {field}", found)
    assert error.needed
    assert error.remedy


def test_hidden_size_must_be_the_drafts(tiny):
    path = tiny(("hidden_size = 512", "hidden_size = 256"))

    error = refusal(path)

    assert error.where == f"{path}: hidden_size"
    assert "512, the target_hidden_size of the draft tiny_dspark" in error.needed


def test_nvfp4_slices_keep_whole_scale_groups(tiny):
    path = tiny(
        ('weight_dtype = "bfloat16"', 'weight_dtype = "nvfp4"'), ("moe_hidden_size = 256", "moe_hidden_size = 272")
    )

    error = refusal(path)

    assert error.where == f"{path}: experts.moe_hidden_size"
    assert error.needed == "a size that TP 2 of tp_sizes divides in whole groups of 16"


def test_a_draft_beside_the_file_goes_before_a_built_in_one(tiny, tmp_path):
    text = (GEOMETRY_DIR / "tiny_dspark.toml").read_text(encoding="utf-8")
    (tmp_path / "tiny_dspark.toml").write_text(text.replace("markov_rank = 32", "markov_rank = 64"), encoding="utf-8")

    assert deployment(tiny(), 1).draft.markov_rank == 64
    assert deployment("tiny", 1).draft.markov_rank == 32


def test_a_problem_of_the_draft_names_the_drafts_file(tiny, tmp_path):
    text = (GEOMETRY_DIR / "tiny_dspark.toml").read_text(encoding="utf-8")
    draft = tmp_path / "tiny_dspark.toml"
    draft.write_text(text.replace("num_speculative_tokens = 7", "num_speculative_tokens = 3"), encoding="utf-8")

    assert refusal(tiny()).where == f"{draft}: num_speculative_tokens"


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"name =", b"x = " + b"[" * 5000, b"x = " + b"9" * 5000, b"a.b = 1\na = 2", b"\0"],
    ids=["empty", "no UTF-8", "cut short", "deep nesting", "huge number", "two meanings", "NUL"],
)
def test_a_file_that_is_no_geometry(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)

    assert refusal(path).where.startswith(str(path))


def test_a_file_that_cannot_be_read(tmp_path):
    fifo = tmp_path / "fifo.toml"
    os.mkfifo(fifo)

    found = [refusal(path).found for path in (fifo, tmp_path, tmp_path / "none.toml", "./none.toml")]
    assert found == ["something that is no file"] * 2 + ["no such file"] * 2


def test_a_file_without_read_permission(tiny, monkeypatch):
    path = tiny()
    monkeypatch.setattr(type(path), "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))

    assert refusal(path).found == "an unreadable file (Permission denied)"


@given(st.binary(max_size=200))
def test_no_bytes_leak_another_exception(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "tiny.toml"
    path.write_bytes(content)

    assert refusal(path).where.startswith(str(path))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner))


@given(st.data())
def test_no_value_leaks_another_exception(data):
    path = GEOMETRY_DIR / "tiny.toml"
    content = geometry_file.read(path, "tiny")
    table = data.draw(st.sampled_from([content, content["attention"], content["experts"], content["norms"]]))
    table[data.draw(st.sampled_from(sorted(table)))] = data.draw(VALUES)
    read = geometry_file.read
    with patch.object(geometry_file, "read", lambda file, shown: content if file == path else read(file, shown)):
        try:
            where = f"kernel_specs/geometry/{load_geometry(path).name}"
        except GeometryError as error:
            where = error.where

    assert where.startswith("kernel_specs/geometry/tiny")
