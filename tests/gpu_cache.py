"""Kernels for tests on a GPU: from the cache root that JITSPARK_GPU_CACHE names, or else from the usual cache."""

import functools
import os
from pathlib import Path

import pytest

from bench import machine
from jitspark.checking.packed import load_kernels
from jitspark.errors import MissingEntriesError
from jitspark.settings import from_environment


@functools.cache
def cache_root():
    named = os.environ.get("JITSPARK_GPU_CACHE")
    return Path(named) if named else from_environment().cache_dir


def kernel_of(specialization):
    """The loaded kernel; skips where this GPU is not supported, and where the entry is missing."""
    target = machine.own_target()
    if target not in specialization.spec.targets:
        pytest.skip(f"{specialization.name} does not support {target}")
    try:
        (kernel,) = load_kernels(cache_root(), [specialization], target).values()
    except MissingEntriesError:
        pytest.skip(f"{cache_root()} has no entries for this GPU's kernels: bin/make-gpu-pack makes them")
    return kernel.function
