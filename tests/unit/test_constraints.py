"""What a constraint says of sizes: amounts that are worked out, conditions, and texts that explain a refusal."""

import pytest

from jitspark.constraints import AtLeast, AtMost, Divisible, Equals, OneOf, names_in
from jitspark.errors import SpecError

BECAUSE = "so it is"


@pytest.mark.parametrize(
    ("constraint", "good", "bad", "text"),
    [
        (Divisible("n", 8, BECAUSE), {"n": 16}, {"n": 12}, "n=12 is not divisible by 8"),
        (Divisible("n", "k", BECAUSE), {"n": 6, "k": 3}, {"n": 6, "k": 4}, "n=6 is not divisible by k = 4"),
        (Divisible("n", "k", BECAUSE), {"n": 6, "k": 3}, {"n": 6, "k": 0}, "n=6 is not divisible by k = 0"),
        (AtMost("n", "2 * k", BECAUSE), {"n": 6, "k": 3}, {"n": 7, "k": 3}, "n=7 is more than 2 * k = 6"),
        (AtMost("n * k", 12, BECAUSE), {"n": 4, "k": 3}, {"n": 5, "k": 3}, "n * k=15 is more than 12"),
        (AtLeast("n", "k - 1", BECAUSE), {"n": 2, "k": 3}, {"n": 1, "k": 3}, "n=1 is less than k - 1 = 2"),
        (Equals("n", "k + 1", BECAUSE), {"n": 4, "k": 3}, {"n": 3, "k": 3}, "n=3 is not k + 1 = 4"),
        (Equals("n", "2 * (k + m)", BECAUSE), {"n": 8, "k": 3, "m": 1}, {"n": 7, "k": 3, "m": 1}, "n=7 is not"),
        (Equals("n", "ceil_div(k, 4)", BECAUSE), {"n": 2, "k": 5}, {"n": 1, "k": 5}, "n=1 is not ceil_div(k, 4) = 2"),
        (Equals("n", "k // 2 * 3", BECAUSE), {"n": 6, "k": 5}, {"n": 7, "k": 5}, "n=7 is not k // 2 * 3 = 6"),
        (Equals("n", "max(k, min(m, 4))", BECAUSE), {"n": 4, "k": 1, "m": 9}, {"n": 9, "k": 1, "m": 9}, "n=9 is not"),
        (OneOf("n", (2, 4, 8), BECAUSE), {"n": 4}, {"n": 6}, "n=6 is none of 2, 4, 8"),
    ],
)
def test_a_broken_constraint_tells_both_sides_and_the_reason(constraint, good, bad, text):
    assert constraint.broken(good) is None
    said = constraint.broken(bad)
    assert said.startswith(text)
    assert said.endswith(f"({BECAUSE})")


@pytest.mark.parametrize(
    "constraint",
    [
        Divisible("n", "k", BECAUSE),
        AtMost("n", "2 * k", BECAUSE),
        AtLeast("n", "k + 1", BECAUSE),
        Equals("n * k", 9, BECAUSE),
        Equals("n", "max(k, 3)", BECAUSE),
    ],
)
def test_nothing_is_said_before_every_name_has_a_value(constraint):
    assert constraint.broken({"n": 7}) is None
    assert any(constraint.broken({"n": 7, "k": k}) for k in (2, 9))


def test_a_condition_limits_where_a_constraint_applies():
    constraint = Equals("n", 1, BECAUSE, when=("exchanged", False))

    assert constraint.broken({"n": 2, "exchanged": True}) is None
    assert constraint.broken({"n": 2}) is None
    assert constraint.broken({"n": 2, "exchanged": False}) == f"n=2 is not 1 ({BECAUSE})"


@pytest.mark.parametrize(
    "amount",
    ["n +", "n ** 2", "n / 2", "-n", "n.real", "abs(n)", "min(n)", "n if n else 1", "'n'", "1.5", "[n]", "n(1, 2)"],
)
def test_an_amount_that_cannot_be_read_is_refused(amount):
    with pytest.raises(SpecError, match="needed names and whole numbers"):
        list(names_in(AtMost("n", amount, BECAUSE)))
    with pytest.raises(SpecError):
        AtMost("n", amount, BECAUSE).broken({"n": 1})


def test_all_names_of_a_constraint_are_known():
    constraint = Equals("n", "ceil_div(k, 16 * m) + min(k, 2)", BECAUSE, when=("capped", True))

    assert set(names_in(constraint)) == {"n", "k", "m", "capped"}
    assert set(names_in(OneOf("n", (1, 2), BECAUSE))) == {"n"}
