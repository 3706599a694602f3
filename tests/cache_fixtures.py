"""Fixtures of cache tests, imported by the conftest of each folder that has some."""

import logging
import os
import tempfile
from pathlib import Path

import pytest
from stub_cache import fill, make_templates, wanted

from jitspark.cache.store import Layer
from jitspark.notice import say_once


@pytest.fixture(scope="session")
def templates(tmp_path_factory):
    """The folder with the stub kernels' templates."""
    return make_templates(tmp_path_factory.mktemp("templates"))


@pytest.fixture
def memory_path(tmp_path):
    """A folder in memory, where forcing files to disk costs nothing; the test's own folder where there is none."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="jitspark-test-", dir="/dev/shm", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def entry(tmp_path, templates):
    """One good entry in a writable root."""
    return fill(tmp_path / "cache", wanted(1), templates)[0]


@pytest.fixture
def warnings(caplog):
    """The warnings of this test so far, as texts; nothing counts as said already."""
    say_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="jitspark")
    logging.getLogger("jitspark").propagate = True
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def read_only(tmp_path, templates):
    """A function that fills a read-only layer of a name."""

    def made(name, items, toolchain=None):
        fill(tmp_path / name, items, templates, toolchain)
        return Layer(tmp_path / name, writable=False)

    return made
