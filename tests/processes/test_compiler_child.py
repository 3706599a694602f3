"""One compiler child: what it answers, and what it refuses to answer for."""

from dataclasses import replace

import pytest

from jitspark.build import wanted_for
from jitspark.compiler_child import CompilerChild
from jitspark.errors import SpecError
from jitspark.geometry import deployment
from jitspark.registry import specializations


@pytest.fixture
def child():
    child = CompilerChild()
    yield child
    child.close()


def test_bytes_of_other_sources_than_the_key_says_are_refused(child, tmp_path):
    (item, *_) = wanted_for(specializations(deployment("tiny", 1), ["rmsnorm"]), ["sm_90a"])
    child.ask(item.specialization, replace(item.key, recipe="0" * 64), tmp_path)
    with pytest.raises(SpecError, match="changed after its key was made"):
        child.answer()

    child.ask(item.specialization, item.key, tmp_path)
    assert "Tensor(" in child.answer().signature
