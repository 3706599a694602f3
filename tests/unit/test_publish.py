"""Publishing: everything is on disk before it can be seen, and that it can be seen is then put on disk too."""

import os
from pathlib import Path

from stub_cache import fill, wanted

from jitspark.cache.store import ARTIFACT, RECORD

(ITEM,) = wanted(1)


def test_an_entry_is_on_disk_before_it_is_visible(tmp_path, templates, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename

    def watched_fsync(descriptor):
        fsync(descriptor)
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))

    def watched_rename(source, *rest, **places):
        events.append("rename")
        events.append(Path(source))
        rename(source, *rest, **places)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    fill(tmp_path / "cache", [ITEM], templates)
    moment = events.index("rename")
    staged, before, after = events[moment + 1], events[:moment], events[moment + 2 :]

    assert {staged / ARTIFACT, staged / RECORD} <= set(before)
    assert before.index(staged / ARTIFACT) < before.index(staged / RECORD) < before.index(staged)
    assert tmp_path / "cache" / "artifacts-v1" / ITEM.key.path in after
