"""Who holds a lock, as told by its holder's process."""

import os
from pathlib import Path

import pytest

from jitspark.cache.lock import Holder


@pytest.mark.parametrize(("state", "stuck"), [("T", True), ("t", True), ("D", False), ("S", False), ("R", False)])
def test_only_a_stopped_holder_is_stuck(monkeypatch, state, stuck):
    """One that waits for a disk is in state D, for a moment, again and again."""
    monkeypatch.setattr(Path, "read_text", lambda _: f"1 (a ) name) {state} 0 0")

    assert Holder(1, os.uname().nodename, "compiling", 0.0).is_stuck() is stuck
