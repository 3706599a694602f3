"""Hostile files, by the thousand: refused by the one typed error or understood, never a crash.

20,000 inputs in all. `bench/fuzz.py` runs a million; docs/cache_figures.md has the result.
"""

import json

import fuzz_targets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = 2250  # of each of nine tests
fuzzed = settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)

TEXTS = st.text(max_size=12) | st.sampled_from(["..", "../../x", "\x1b[2J", "\x00", "sm_90a", "x86_64-linux", "stub"])
NUMBERS = st.integers() | st.floats() | st.sampled_from([2**63, -1, 10**400])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def paths(value, at=()):
    """Where in a JSON value something could be replaced."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from paths(item, (*at, name))


def replaced(value, at, new):
    if not at:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[at[0]] = replaced(value[at[0]], at[1:], new)
    return copy


@st.composite
def changed(draw, good):
    """A JSON value with one or two places replaced by anything, as canonical text."""
    for _ in range(draw(st.integers(1, 2))):
        good = replaced(good, draw(st.sampled_from(list(paths(good)))), draw(VALUES))
    return json.dumps(good, sort_keys=True, separators=(",", ":")).encode()


@st.composite
def mutated(draw, seeds):
    """Bytes of a good input with slices cut, doubled or overwritten."""
    content = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 2))):
        start = draw(st.integers(0, len(content)))
        content[start : start + draw(st.integers(0, 20))] = draw(st.binary(max_size=20))
    return bytes(content)


SEEDS = fuzz_targets.seeds()


@pytest.mark.parametrize("target", SEEDS, ids=lambda target: target.__name__)
def test_the_good_input_is_taken(target):
    for content in SEEDS[target]:
        target(content)


@pytest.mark.parametrize("target", SEEDS, ids=lambda target: target.__name__)
def test_mutated_bytes_are_refused_or_understood(target):
    fuzzed(given(mutated(SEEDS[target]))(target))()


@pytest.mark.parametrize("target", [fuzz_targets.record_body, fuzz_targets.named_record], ids=lambda t: t.__name__)
def test_changed_records_are_refused_or_understood(target):
    fuzzed(given(changed(fuzz_targets.good_body()))(target))()
