"""Every error class crosses process boundaries whole and says its four parts in order."""

import json
import pickle
import re
from pathlib import Path

import pytest

from jitspark import errors
from jitspark.errors import JitsparkError

CLASSES = sorted(errors._all_classes(JitsparkError), key=lambda cls: cls.__name__)
PARTS = {"where": "the place", "found": "a problem", "needed": "a solution", "remedy": "Do this."}
README = Path(__file__).resolve().parents[2] / "README.md"


def documented_exit_codes():
    section = README.read_text(encoding="utf-8").partition("## Exit codes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \| ([^|]*) \|", section, flags=re.MULTILINE)
    return {name: int(code) for code, names in rows for name in re.findall(r"`(\w+)`", names)}


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


def test_the_readme_lists_every_error_with_its_exit_code():
    assert documented_exit_codes() == {cls.__name__: cls.exit_code for cls in CLASSES}


def test_an_unknown_class_becomes_the_base_class():
    error = JitsparkError.from_json({"error": "FutureError", **PARTS})

    assert type(error) is JitsparkError
    assert error.found == "a problem"
