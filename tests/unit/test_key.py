"""What a key is made of, byte for byte: these literals change only when every cache is meant to be a miss."""

import hashlib

import pytest
from stub_cache import other_toolchain

from jitspark.errors import SpecError
from jitspark.key import Key, Recipe, canonical, digest_of, plain, toolchain_digest

RECIPE = Recipe(
    kernel="rmsnorm",
    spec={"args": [{"name": "x", "align": 16}], "axes": {"num_tokens": "var"}},
    axes={"hidden_size": 4096},
    dtypes={"activation": "bfloat16"},
    statics={"eps": 1e-6, "fused": True, "stages": 3, "none": None},
    target="sm_100a",
    host="x86_64-linux",
    sources={"kernel_specs/rmsnorm/kernel.py": "0" * 64},
    options=("--enable-tvm-ffi", "--gpu-arch sm_100a"),
    procedure=1,
)
CANONICAL = (
    b'{"axes":{"hidden_size":4096},"dtypes":{"activation":"bfloat16"},"host":"x86_64-linux","kernel":"rmsnorm",'
    b'"options":["--enable-tvm-ffi","--gpu-arch sm_100a"],"procedure":1,"sources":{"kernel_specs/rmsnorm/kernel.py":'
    b'"0000000000000000000000000000000000000000000000000000000000000000"},"spec":{"args":[{"align":16,"name":"x"}],'
    b'"axes":{"num_tokens":"var"}},"statics":{"eps":{"float":"0x1.0c6f7a0b5ed8dp-20"},"fused":true,"none":null,'
    b'"stages":3},"target":"sm_100a"}'
)


def test_the_canonical_text_of_a_recipe():
    assert canonical(RECIPE) == CANONICAL


def test_the_golden_digests():
    assert RECIPE.digest == "492b332569c4607003a2e32540178f4cb16197611be7533352a495efe4b3eb27"
    assert toolchain_digest(other_toolchain()) == "c3c081b286f9a18518a4ad92f48f0f9d6612ffe9479ab5b56a354723ab466cce"


def test_the_digest_is_plain_sha256_of_the_canonical_text():
    assert RECIPE.digest == hashlib.sha256(CANONICAL).hexdigest()


def test_the_key_is_the_path():
    assert RECIPE.key.path == f"sm_100a-x86_64-linux/rmsnorm/{RECIPE.digest}"


def test_the_order_of_names_does_not_matter():
    assert canonical({"b": 1, "a": {"d": 2, "c": 3}}) == canonical({"a": {"c": 3, "d": 2}, "b": 1})


def test_the_order_of_a_list_does():
    assert canonical([1, 2]) != canonical([2, 1])


def test_plain_values_pass_through_unchanged():
    assert plain(plain(RECIPE)) == plain(RECIPE)
    assert digest_of(plain(RECIPE)) == RECIPE.digest


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-6, 1.0, float("inf"), float("nan")])
def test_floats_are_told_apart_exactly(value):
    others = {canonical(other) for other in (0.0, -0.0, 1e-6, 1.0, float("inf"), float("nan"), 1.0000000000000002)}

    assert canonical(value) in others
    assert len(others) == 7


def test_a_name_that_is_no_text_is_refused_with_its_place():
    with pytest.raises(SpecError, match=r"statics\.1"):
        canonical({"statics": {1: 2}})


def test_keys_sort():
    keys = [Key("sm_90a", "x86_64-linux", "b", "0" * 64), Key("sm_90a", "x86_64-linux", "a", "1" * 64)]

    assert [key.kernel for key in sorted(keys)] == ["a", "b"]
