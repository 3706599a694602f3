"""The spec vocabulary: what it refuses, and that a refusal explains itself."""

from dataclasses import FrozenInstanceError, replace

import pytest

from jitspark.errors import SpecError
from jitspark.spec import CONST, VAR, AtLeast, AtMost, Case, Divisible, KernelSpec, Scalar, Tensor

BECAUSE = "vectors of 8"
SPEC = KernelSpec(
    name="scale",
    axes={"num_tokens": VAR, "hidden_size": CONST},
    dtypes={"activation": ("bfloat16", "float16"), "weight": ("float32",)},
    statics={"offset": (0.0, 1.0), "split": (1, 2)},
    args=(
        Tensor("x", ("num_tokens", "hidden_size"), "activation"),
        Tensor("gain", ("hidden_size",), "weight", when=("split", 2)),
        Tensor("out", ("num_tokens", "hidden_size"), "activation", role="out"),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Divisible("hidden_size", by=8, because=BECAUSE),
        AtMost("hidden_size", 64, because="registers"),
        AtLeast("num_tokens", "split", because="a row for each part"),
    ),
    targets=("sm_90a",),
    kernel="kernel:scale",
    reference="reference:scale",
)
CHOSEN = {"axes": {"hidden_size": 16}, "dtypes": {"activation": "bfloat16"}, "statics": {"offset": 0.0, "split": 1}}


def refusal(**changed):
    with pytest.raises(SpecError) as caught:
        SPEC.specialize(**{**CHOSEN, **changed})
    return caught.value


def test_choosing_keeps_consts_and_drops_vars():
    made = SPEC.specialize(**{**CHOSEN, "axes": {"hidden_size": 16, "num_tokens": 5}})

    assert dict(made.axes) == {"hidden_size": 16}
    assert dict(made.dtypes) == {"activation": "bfloat16", "weight": "float32"}
    assert made == SPEC.specialize(**CHOSEN)


def test_the_factory_gets_consts_statics_and_roles_with_a_choice():
    assert SPEC.specialize(**CHOSEN).factory_arguments() == {
        "hidden_size": 16,
        "offset": 0.0,
        "split": 1,
        "activation": "bfloat16",
    }


@pytest.mark.parametrize(("split", "names"), [(1, ["x", "out", "eps"]), (2, ["x", "gain", "out", "eps"])])
def test_an_argument_exists_only_where_its_static_says(split, names):
    made = SPEC.specialize(**{**CHOSEN, "statics": {"offset": 0.0, "split": split}})

    assert [arg.name for arg in made.args] == names


def test_dtypes_come_from_the_role_or_are_literal():
    made = SPEC.specialize(**CHOSEN)

    assert [made.dtype_of(arg) for arg in made.args] == ["bfloat16", "bfloat16", "float32"]


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"axes": {}}, "missing axis 'hidden_size'"),
        ({"axes": {"hidden_size": 16, "width": 1}}, "unknown axis 'width'"),
        ({"axes": {"hidden_size": 0}}, "axis hidden_size=0"),
        ({"axes": {"hidden_size": -8}}, "axis hidden_size=-8"),
        ({"axes": {"hidden_size": 16.0}}, "axis hidden_size=16.0"),
        ({"axes": {"hidden_size": True}}, "axis hidden_size=True"),
        ({"dtypes": {}}, "missing dtype role 'activation'"),
        ({"dtypes": {"activation": "float64"}}, "dtype role activation='float64'"),
        ({"statics": {"offset": 0.0}}, "missing static 'split'"),
        ({"statics": {"offset": 0.5, "split": 1}}, "static offset=0.5"),
        ({"statics": {"offset": 0, "split": 1}}, "static offset=0"),
        ({"statics": {"offset": 0.0, "split": True}}, "static split=True"),
    ],
)
def test_a_choice_that_is_not_offered(changed, found):
    assert refusal(**changed).found == found


def test_a_broken_constraint_says_why():
    error = refusal(axes={"hidden_size": 20})

    assert error.where == "scale"
    assert error.found == f"hidden_size=20 is not divisible by 8 ({BECAUSE})"
    assert refusal(axes={"hidden_size": 72}).found == "hidden_size=72 is more than 64 (registers)"


def test_a_case_checks_its_var_axes_too():
    case = Case({"num_tokens": 1, "hidden_size": 16}, {"activation": "float16"}, {"offset": 0.0, "split": 2}, 0.0, 0.0)

    with pytest.raises(SpecError, match="num_tokens=1 is less than split = 2"):
        SPEC.specialize_case(case)


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"statics": {"hidden_size": (1,), "split": (1, 2)}}, "the name 'hidden_size' twice"),
        ({"args": (Tensor("x", ("rows",), "activation"),)}, "argument x with unknown axis 'rows'"),
        ({"args": (Tensor("x", (4,), "activations"),)}, "argument x of unknown dtype or role 'activations'"),
        ({"args": (Tensor("x", (4,), "activation", role="output"),)}, "argument x with role 'output'"),
        ({"args": (Tensor("x", (4, 4), "activation", strides=(1,)),)}, "argument x with 1 strides for 2 axes"),
        ({"args": (Scalar("x", "float32", when=("nix", 1)),)}, "argument x that depends on an unknown static 'nix'"),
        (
            {"constraints": (AtMost("hidden_size", "2 * rows", because=BECAUSE),)},
            "a constraint on hidden_size with the unknown name 'rows'",
        ),
        (
            {"constraints": (AtMost("hidden_sizes", 8, because=BECAUSE),)},
            "a constraint on hidden_sizes with the unknown name 'hidden_sizes'",
        ),
    ],
)
def test_a_declaration_that_contradicts_itself(changed, found):
    with pytest.raises(SpecError) as caught:
        replace(SPEC, **changed)

    assert caught.value.found == found


def test_specs_and_specializations_cannot_be_changed():
    made = SPEC.specialize(**CHOSEN)

    with pytest.raises(FrozenInstanceError):
        SPEC.name = "other"
    for mapping in (SPEC.axes, SPEC.dtypes, SPEC.statics, made.axes, made.dtypes, made.statics):
        with pytest.raises(TypeError):
            mapping["new"] = 1


def test_a_title_names_what_was_chosen():
    assert SPEC.specialize(**CHOSEN).title() == "scale(hidden_size=16, activation=bfloat16, offset=0.0, split=1)"
