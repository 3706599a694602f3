"""The ledger counts uses, refuses pickles, and its loss changes nothing."""

import json
import os
import pickle
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stub_cache import fill, lookup_in, settings_for, wanted

from cache_tools.prune import Rules, prune
from cache_tools.stats import stats
from jitspark.building.build import build, note_uses
from jitspark.cache import ledger
from jitspark.cache.ledger import LEDGER, TextDisk, Use, lines, note
from jitspark.cache.store import Layer


@pytest.fixture
def layer(entry):
    return entry.layer


def test_uses_add_up(entry, layer):
    note(layer, [Use(entry, compile_seconds=1.5)])
    note(layer, [Use(entry), Use(entry), Use(entry, waited=True)])

    (line,) = lines(layer)
    assert (line.hits, line.misses, line.waits, line.compiles, line.compile_ms) == (2, 2, 1, 1, 1500)
    assert line.entry == f"{entry.key.path}/{entry.toolchain}"
    assert line.bytes == entry.record.size


def test_uses_of_a_read_only_layer_are_noted_in_the_writable_one(layer, read_only):
    image = read_only("image", wanted(1, start=7))
    used = lookup_in(image).find(wanted(1, start=7)[0].key)

    note(layer, [Use(used)])

    assert [line.layer for line in lines(layer)] == [str(image.root)]
    assert not (image.root / LEDGER).exists()


def test_a_build_and_load_is_noted(layer, tmp_path):
    report = build(wanted(1), lookup_in(layer), settings_for(layer.root, tmp_path))

    note_uses(report, lookup_in(layer))

    assert [line.hits for line in lines(layer)] == [1]
    assert [(row.kernel, row.entries, row.hits) for row in stats([layer])] == [("stub", 1, 1)]


def test_without_a_writable_layer_nothing_is_noted(read_only, tmp_path):
    image = read_only("image", wanted(1))
    lookup = lookup_in(image)

    note_uses(build(wanted(1), lookup, settings_for(None, tmp_path)), lookup)

    assert not (image.root / LEDGER).exists()


class Trap:
    """Unpickling this is what must not happen."""

    def __reduce__(self):
        return Path.touch, (Path("trap-was-sprung"),)


@pytest.mark.parametrize("column", ["value", "key"])
@pytest.mark.parametrize("mode", [1, 2, 3, 4])
def test_a_row_that_claims_to_be_a_pickle_or_a_file_is_never_read(entry, layer, tmp_path, monkeypatch, column, mode):
    monkeypatch.chdir(tmp_path)
    note(layer, [Use(entry)])
    with sqlite3.connect(layer.root / LEDGER / "cache.db") as database:
        payload = pickle.dumps(Trap())
        if column == "value":
            database.execute("UPDATE Cache SET mode = ?, value = ?, filename = '../../x'", (mode, payload))
        else:
            database.execute("UPDATE Cache SET raw = 0, key = ?", (payload,))

    assert lines(layer) == []
    note(layer, [Use(entry)])
    assert not (tmp_path / "trap-was-sprung").exists()


def test_the_trap_would_spring(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pickle.loads(pickle.dumps(Trap()))

    assert (tmp_path / "trap-was-sprung").exists()


@pytest.mark.parametrize("value", [1, 1.5, b"x", None, ["x"], {"a": 1}, True, "x" * 100_000])
def test_only_texts_are_stored(tmp_path, value):
    disk = TextDisk(str(tmp_path))

    with pytest.raises(ValueError, match="text"):
        disk.store(value, read=False)
    with pytest.raises(ValueError, match="text"):
        disk.put(value)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", '{"layer": 1}', "[" * 50_000, '{"layer": "a", "entry": "b", "x": 1}']
)
def test_a_line_that_makes_no_sense_counts_as_none_and_is_overwritten(entry, layer, text):
    note(layer, [Use(entry)])
    with sqlite3.connect(layer.root / LEDGER / "cache.db") as database:
        database.execute("UPDATE Cache SET value = ?", (text,))

    assert lines(layer) == []
    note(layer, [Use(entry)])
    assert [line.hits for line in lines(layer)] == [1]


DAMAGES = {
    "no database": lambda path: path.unlink(),
    "an empty database": lambda path: path.write_bytes(b""),
    "a text": lambda path: path.write_text("not a database, but long enough to be looked at " * 100),
    "half a database": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "no tables": lambda path: sqlite3.connect(path).executescript("DROP TABLE Cache; DROP TABLE Settings"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_ledger_is_lost_and_changes_nothing(entry, layer, tmp_path, damage):
    note(layer, [Use(entry)])
    for extra in (layer.root / LEDGER).glob("cache.db-*"):
        extra.unlink()
    damage(layer.root / LEDGER / "cache.db")

    for _ in range(3):
        note(layer, [Use(entry)])
    assert build(wanted(1), lookup_in(layer), settings_for(layer.root, tmp_path)).hits == 1
    assert len(lines(layer)) == 1


def test_a_ledger_that_another_process_has_locked_is_not_waited_for(entry, layer):
    note(layer, [Use(entry)])
    other = sqlite3.connect(layer.root / LEDGER / "cache.db", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")

    started = time.monotonic()
    note(layer, [Use(entry)])
    took = time.monotonic() - started

    other.execute("COMMIT")
    assert took < 50.0  # a database of SQLite's is waited for for a minute
    assert [line.hits for line in lines(layer)] == [1]


def test_pruning_goes_by_last_use_and_forgets_what_is_gone(tmp_path, templates):
    entries = fill(tmp_path / "cache", wanted(3), templates)
    layer = entries[0].layer
    for entry in entries:
        os.utime(entry.directory, (time.time() - 10**6, time.time() - 10**6))
    note(layer, [Use(entry) for entry in entries[1:]])

    result = prune(layer, Rules(unused_for=86400.0), settings_for(layer.root, tmp_path))

    assert [removed.path for removed in result.removed] == [entries[0].directory]
    assert len(lines(layer)) == 2


@pytest.mark.parametrize(
    ("kind", "network"), [("nfs4", True), ("ext4", False), ("fuse.sshfs", True), ("overlay", False)]
)
def test_no_ledger_on_network_file_systems(tmp_path, kind, network):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"1 2 0:1 / / rw - ext4 /dev/sda rw\n3 4 0:2 / /shared/cache rw - {kind} server:/x rw\n")

    assert ledger._on_network(Path("/shared/cache/jitspark"), mounts) is network
    assert not ledger._on_network(Path("/shared/other"), mounts)


def test_loading_never_imports_the_ledger():
    code = (
        "import jitspark.cache.loader, jitspark.cache.lookup, jitspark.building.build, sys\n"
        "print('jitspark.cache.ledger' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert result.stdout.strip() == "False"


def test_eight_processes_count_together(entry, layer):
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]);"
        "from pathlib import Path; from stub_cache import wanted, lookup_in; from jitspark.cache.store import Layer;"
        "from jitspark.cache import ledger; ledger.WAIT_SECONDS = 600.0;"
        "layer = Layer(Path(sys.argv[2]), writable=True); found = lookup_in(layer).find(wanted(1)[0].key);"
        "[ledger.note(layer, [ledger.Use(found)]) for _ in range(5)]"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).resolve().parents[1]), str(layer.root)]
    note(layer, [Use(entry)])

    processes = [subprocess.Popen(command) for _ in range(8)]

    assert [process.wait() for process in processes] == [0] * 8
    assert [line.hits for line in lines(layer)] == [41]
    assert json.dumps(stats([Layer(layer.root, writable=True)])[0].hits) == "41"


def test_last_use_counts_wherever_a_container_mounts_the_root(entry, layer, tmp_path):
    os.utime(entry.directory, (time.time() - 10**6, time.time() - 10**6))
    note(layer, [Use(entry)])
    moved = Layer(layer.root.rename(tmp_path / "mounted elsewhere"), writable=True)

    assert [line.layer for line in lines(moved)] == [str(moved.root)]
    assert prune(moved, Rules(unused_for=86400.0), settings_for(moved.root, tmp_path)).removed == ()
    assert len(prune(moved, Rules(max_size=0), settings_for(moved.root, tmp_path)).removed) == 1
    assert lines(moved) == []


def test_a_link_to_a_network_file_system_is_seen_through(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "cache").symlink_to("shared")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"1 2 0:1 / / rw - ext4 /dev/sda rw\n3 4 0:2 / {tmp_path.resolve()}/shared rw - nfs4 server:/x rw\n"
    )

    assert ledger._on_network(tmp_path / "cache", mounts)
