"""What a power failure leaves is whole: everything is forced to disk before the rename that shows an entry."""

import os

from stub_cache import artifact_of, record_of, wanted

from jitspark.cache.store import ARTIFACT, RECORD, Layer, put

ITEM = wanted(1)[0]


def test_the_artifact_then_the_record_then_their_folder_are_forced_to_disk_before_the_rename(
    tmp_path, templates, monkeypatch
):
    steps, fsync, rename = [], os.fsync, os.rename

    def noted_fsync(descriptor):
        steps.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def noted_rename(source, target, **folders):
        rename(source, target, **folders)
        steps.append(("renamed", str(source)))

    monkeypatch.setattr("os.fsync", noted_fsync)
    monkeypatch.setattr("os.rename", noted_rename)
    content = artifact_of(ITEM, templates)

    entry = put(Layer(tmp_path, writable=True), ITEM.key, record_of(ITEM, content), content)

    staged = steps[2]
    assert steps == [
        f"{staged}/{ARTIFACT}",
        f"{staged}/{RECORD}",
        staged,
        ("renamed", staged),
        str(entry.directory.parent),
    ]
