"""Every error class crosses process boundaries whole and says its four parts in order."""

import json
import pickle

import pytest

from jitspark import errors
from jitspark.errors import JitsparkError

CLASSES = sorted(errors._all_classes(JitsparkError), key=lambda cls: cls.__name__)
PARTS = {"where": "the place", "found": "a problem", "needed": "a solution", "remedy": "Do this."}
# the documented exit codes (README); 0 is success
EXIT_CODES = {
    "JitsparkError": 1,
    "UsageError": 2,
    "SpecError": 3,
    "GeometryError": 3,
    "TargetError": 3,
    "CacheDirectoryError": 4,
    "EntryError": 4,
    "PackError": 4,
    "ToolchainError": 5,
    "CompileError": 6,
    "MissingEntriesError": 7,
}


def every_field(cls):
    extra = {"CompileError": {"log": "ld: no"}, "MissingEntriesError": {"keys": ("a/b", "c/d")}}
    return {**PARTS, **extra.get(cls.__name__, {})}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_survives_json(cls):
    error = cls(**every_field(cls))

    again = JitsparkError.from_json(json.loads(json.dumps(error.to_json())))

    assert type(again) is cls
    assert (str(again), again.to_json()) == (str(error), error.to_json())
    assert vars(again) == vars(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_survives_pickle(cls):
    error = cls(**every_field(cls))

    again = pickle.loads(pickle.dumps(error))

    assert type(again) is cls
    assert vars(again) == vars(error)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_says_where_found_needed_remedy_in_this_order(cls):
    text = str(cls(**every_field(cls)))

    assert text.startswith("the place: found a problem; needed a solution. Do this.")


def test_exit_codes_are_the_documented_ones():
    assert {cls.__name__: cls.exit_code for cls in CLASSES} == EXIT_CODES


def test_an_unknown_class_becomes_the_base_class():
    error = JitsparkError.from_json({"error": "FutureError", **PARTS})

    assert type(error) is JitsparkError
    assert error.found == "a problem"
