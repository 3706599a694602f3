"""Every choice that a spec's constraints accept is one that its kernel can be made for.

What a kernel asserts of its sizes is for our own mistakes: a caller is to be told by a constraint, with its reason.
"""

import importlib

import pytest

from jitspark.errors import SpecError
from jitspark.registry import kernel_names, load_spec
from jitspark.spec import CONST

STEPS = (-64, -32, -8, -1, 1, 8, 32, 64, 128, 256)


def factory_of(spec):
    module, name = spec.kernel.split(":")
    return getattr(importlib.import_module(f"kernel_specs.{spec.name}.{module}"), name)


def neighbours(spec, case):
    """(axes, statics) that differ from the case's in an axis, in two axes by one factor, or in a static."""
    sizes = [name for name, kind in spec.axes.items() if kind is CONST]
    for name in sizes:
        size = case.axes[name]
        for other in {1, size // 2, 2 * size, 3 * size, *(size + step for step in STEPS)}:
            yield {name: other}, {}
    for factor in (2, 3, 5):
        for at, name in enumerate(sizes):
            for second in sizes[at + 1 :]:
                yield {name: case.axes[name] * factor, second: case.axes[second] * factor}, {}
    for name, choices in spec.statics.items():
        for choice in choices:
            yield {}, {name: choice}


@pytest.mark.parametrize("name", kernel_names())
def test_what_the_constraints_accept_can_be_made(name):
    spec = load_spec(name)
    factory, tried, accepted = factory_of(spec), set(), 0
    for case in spec.cases:
        for axes, statics in neighbours(spec, case):
            try:
                made = spec.specialize(
                    axes={**case.axes, **axes}, dtypes=case.dtypes, statics={**case.statics, **statics}
                )
            except SpecError:
                continue
            arguments = made.factory_arguments()
            if tuple(arguments.items()) in tried:
                continue
            tried.add(tuple(arguments.items()))
            try:
                factory(**arguments)
            except Exception as error:  # noqa: BLE001 - whatever it is, no constraint foresaw it
                pytest.fail(f"{made.title()} is accepted, but cannot be made: {error!r}")
            accepted += 1

    assert accepted, "no case's own choices were accepted"
