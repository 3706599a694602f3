"""Every case of every kernel on this machine's GPU, as `bin/check-gpu` does it.

From the cache root that JITSPARK_GPU_CACHE names, or else from the usual cache. Entries that are missing skip.
"""

import functools
import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from bench import machine  # noqa: E402
from bench.check import every_case  # noqa: E402
from jitspark.checking.check import check_case  # noqa: E402
from jitspark.checking.packed import load_kernels  # noqa: E402
from jitspark.errors import MissingEntriesError  # noqa: E402
from jitspark.settings import from_environment  # noqa: E402
from jitspark.target import TARGETS  # noqa: E402

WORK = every_case(TARGETS[0])


@functools.cache
def cache_root():
    named = os.environ.get("JITSPARK_GPU_CACHE")
    return Path(named) if named else from_environment().cache_dir


def kernel_of(specialization):
    target = machine.own_target()
    if target not in specialization.spec.targets:
        pytest.skip(f"{specialization.name} does not support {target}")
    try:
        (kernel,) = load_kernels(cache_root(), [specialization], target).values()
    except MissingEntriesError:
        pytest.skip(f"{cache_root()} has no entries for this GPU's kernels: bin/make-gpu-pack makes them")
    return kernel.function


@pytest.mark.parametrize("work", WORK, ids=[f"{item.specialization.name}-{i}" for i, item in enumerate(WORK)])
def test_a_kernel_does_what_its_reference_does(work):
    kernel = kernel_of(work.specialization)
    generator = torch.Generator(device="cuda")
    generator.seed()

    outcome = check_case(work.specialization, work.case, kernel, generator)

    assert outcome.passed, "\n".join([outcome.title, *outcome.problems])
