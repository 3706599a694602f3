"""What prune removes, what stays, and that verify and stats say what is there."""

import errno
import json
import os
import time

import pytest
from stub_cache import fill, lookup_in, number_of, other_toolchain, settings_for, wanted

from cache_tools.pins import keys_of_plan, pinned_keys
from cache_tools.prune import Rules, prune
from cache_tools.quantities import parse_age, parse_size
from cache_tools.stats import stats
from cache_tools.verify import verify
from jitspark.cache.failures import FAILURES, remember_failure, remembered_failure
from jitspark.cache.loader import Loader
from jitspark.cache.lock import Lock, keys_folder
from jitspark.cache.store import Layer, keys_in
from jitspark.errors import CacheDirectoryError, CompileError, ToolchainError, UsageError

ITEMS = wanted(4)


@pytest.fixture
def layer(tmp_path, templates):
    """Four entries, the first used longest ago."""
    entries = fill(tmp_path / "cache", ITEMS, templates)
    for age, entry in zip((40_000, 30_000, 20_000, 10_000), entries, strict=True):
        os.utime(entry.directory, (time.time() - age, time.time() - age))
    return entries[0].layer


@pytest.fixture
def run(layer, tmp_path):
    settings = settings_for(layer.root, tmp_path)
    return lambda **rules: prune(layer, Rules(**rules), settings)


def left(layer):
    return {key for key, _ in keys_in(layer)}


def keys(items):
    return {item.key for item in items}


def entry_size(layer):
    return sum(path.stat().st_size for path in next((layer.root / "artifacts-v1").rglob("kernel.so")).parent.iterdir())


def test_the_least_recently_used_go_until_the_size_is_met(layer, run):
    result = run(max_size=2 * entry_size(layer) + 100)

    assert left(layer) == keys(ITEMS[2:])
    assert (result.kept, len(result.removed)) == (2, 2)
    assert result.freed > 2 * 13_000


def test_what_was_not_used_for_long_goes(layer, run):
    run(unused_for=25_000.0)

    assert left(layer) == keys(ITEMS[2:])


def test_a_dry_run_says_the_same_and_removes_nothing(layer, run):
    dry = run(unused_for=25_000.0, dry_run=True)

    assert left(layer) == keys(ITEMS)
    assert dry.removed == run(unused_for=25_000.0).removed


def test_other_toolchains_go_and_this_ones_stays(layer, run, templates):
    fill(layer.root, ITEMS[:2], templates, other_toolchain())

    result = run(other_toolchains=True)

    assert len(result.removed) == 2
    assert len(list(keys_in(layer))) == 4


def test_without_a_toolchain_nobody_elses_can_be_told(run, monkeypatch):
    monkeypatch.setattr("cache_tools.prune.own_toolchain", lambda: None)

    with pytest.raises(ToolchainError):
        run(other_toolchains=True)


def test_folders_of_other_layouts_go_and_nothing_else(layer, run):
    for name in ("artifacts-v0", "plans-v0", "plans-v1", "runtime-v1", "artifacts-v1x", "precious"):
        (layer.root / name).mkdir(exist_ok=True)
        (layer.root / name / "file").write_text("x")

    result = run(old_layouts=True)

    assert {each.path.name for each in result.removed} == {"artifacts-v0", "plans-v0"}
    assert {"plans-v1", "runtime-v1", "artifacts-v1x", "precious", "artifacts-v1"} <= set(os.listdir(layer.root))


def test_no_rule_removes_no_entry(layer, run):
    assert run().removed == ()
    assert left(layer) == keys(ITEMS)


def write_plan(layer, name, content):
    (layer.root / "plans-v1").mkdir(exist_ok=True)
    (layer.root / "plans-v1" / name).write_text(content if isinstance(content, str) else json.dumps(content))


def test_what_a_stored_plan_pins_stays(layer, run):
    write_plan(layer, "a.json", {"keys": [ITEMS[0].key.path, ITEMS[2].key.path], "anything": "else"})

    result = run(max_size=0)

    assert left(layer) == keys([ITEMS[0], ITEMS[2]])
    assert result.pinned == 2


def test_plans_of_other_layers_pin_too(layer, tmp_path):
    image = Layer(tmp_path / "image", writable=False)
    image.root.mkdir()
    write_plan(image, "a.json", {"keys": [ITEMS[0].key.path]})

    prune(layer, Rules(max_size=0), settings_for(layer.root, tmp_path), [image])

    assert left(layer) == keys(ITEMS[:1])


def test_a_plan_that_was_not_wanted_for_long_goes_and_pins_no_more(layer, run):
    write_plan(layer, "old.json", {"keys": [ITEMS[0].key.path, ITEMS[1].key.path]})
    write_plan(layer, "new.json", {"keys": [ITEMS[0].key.path]})
    os.utime(layer.root / "plans-v1/old.json", (time.time() - 50_000, time.time() - 50_000))

    dry = run(unused_for=25_000.0, dry_run=True)
    assert sorted(os.listdir(layer.root / "plans-v1")) == ["new.json", "old.json"]
    result = run(unused_for=25_000.0)

    assert dry.removed == result.removed
    assert [each.path.name for each in result.removed if each.path.suffix == ".json"] == ["old.json"]
    assert os.listdir(layer.root / "plans-v1") == ["new.json"]
    assert left(layer) == keys([ITEMS[0], *ITEMS[2:]])
    assert run(max_size=0).pinned == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "null",
        "[]",
        "{",
        '{"keys": 1}',
        '{"keys": [1]}',
        '{"keys": ["../x"]}',
        '{"keys": ["a-b/c/d/e"]}',
        "[" * 10**5,
    ],
)
def test_a_plan_that_makes_no_sense_pins_nothing_and_is_said(layer, content, warnings):
    write_plan(layer, "bad.json", content)

    assert pinned_keys([layer]) == set()
    assert "bad.json" in warnings()[0]
    with pytest.raises(ValueError, match=r".*"):
        keys_of_plan(content.encode())


def test_what_somebody_is_building_stays(layer, run, tmp_path):
    folder = keys_folder(tmp_path / "locks", layer.root)
    folder.mkdir(parents=True, mode=0o700)
    (tmp_path / "locks").chmod(0o700)
    lock = Lock(folder / f"{ITEMS[1].key.recipe}.lock")
    assert lock.try_acquire("building")

    result = run(max_size=0)

    assert left(layer) == keys(ITEMS[1:2])
    assert result.busy == 1
    lock.release()


def test_a_loaded_kernel_does_not_notice(layer, run, tmp_path):
    entries = [lookup_in(layer).find(item.key) for item in ITEMS]
    kernels = Loader(settings_for(layer.root, tmp_path)).load(entries)

    run(max_size=0)

    assert left(layer) == set()
    assert [kernel.function() for kernel in kernels] == [number_of(item) for item in ITEMS]


def test_empty_folders_go_with_the_last_entry(layer, run):
    run(max_size=0)

    assert list((layer.root / "artifacts-v1").iterdir()) == []
    assert list((layer.root / "staging").iterdir()) == []


def test_expired_failures_go_and_fresh_ones_stay(layer, run):
    error = CompileError(where="a", found="b", needed="c", remedy="d")
    for item in ITEMS[:2]:
        remember_failure(layer, item.key, "0" * 64, error)
    old = next((layer.root / FAILURES).iterdir())
    os.utime(old, (0, 0))

    assert [each.path for each in run().removed] == [old]
    assert len(list((layer.root / FAILURES).iterdir())) == 1


def test_a_failure_from_the_far_future_counts_as_none(layer):
    remember_failure(layer, ITEMS[0].key, "0" * 64, CompileError(where="a", found="b", needed="c", remedy="d"))
    path = next((layer.root / FAILURES).iterdir())
    assert remembered_failure(layer, ITEMS[0].key, "0" * 64) is not None

    path.write_text(json.dumps({**json.loads(path.read_text()), "expires": 10**12}))

    assert remembered_failure(layer, ITEMS[0].key, "0" * 64) is None


@pytest.mark.parametrize("content", ["", "[]", "null", '{"expires": "x"}', "[" * 10**5, '{"expires": 1e999}'])
def test_a_failure_file_that_makes_no_sense_counts_as_none(layer, content):
    remember_failure(layer, ITEMS[0].key, "0" * 64, CompileError(where="a", found="b", needed="c", remedy="d"))
    next((layer.root / FAILURES).iterdir()).write_text(content)

    assert remembered_failure(layer, ITEMS[0].key, "0" * 64) is None


def test_verify_counts_what_is_good_and_names_what_is_bad(layer):
    assert (verify([layer]).entries, verify([layer]).bad) == (4, ())
    path = next((layer.root / "artifacts-v1").rglob("kernel.so"))
    path.chmod(0o644)
    path.write_bytes(b"damage")
    (layer.root / "artifacts-v1" / f"{ITEMS[0].key.path}" / ("f" * 64)).mkdir()

    result = verify([layer])

    assert result.entries == 5
    assert sorted(bad.found.split()[0] for bad in result.bad) == ["6", "no"]
    assert str(path.parent) in {bad.where for bad in result.bad}
    assert path.exists()


def test_stats_without_a_ledger_count_entries(layer, read_only):
    image = read_only("image", wanted(2, kernel="other"))

    rows = stats([image, layer])

    assert [(row.kernel, row.layer, row.entries, row.hits) for row in rows] == [
        ("other", str(image.root), 2, 0),
        ("stub", str(layer.root), 4, 0),
    ]


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("2GB", 2 * 10**9), ("1.5 KiB", 1536), ("10mb", 10**7), ("7", 7), ("3TB", 3 * 10**12)]
)
def test_sizes(text, size):
    assert parse_size(text, "--max-size") == size


@pytest.mark.parametrize(("text", "seconds"), [("30d", 30 * 86400), ("12h", 43200), ("90s", 90), ("2w", 14 * 86400)])
def test_ages(text, seconds):
    assert parse_age(text, "--unused-for") == seconds


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "2XB", "1e9", "inf", "nan", "2 GB GB", "9" * 40])
def test_what_is_no_quantity_is_refused(text):
    for parse in (parse_size, parse_age):
        with pytest.raises(UsageError) as refused:
            parse(text, "--option")
        assert refused.value.found == repr(text[:80])


def test_what_is_pinned_does_not_count_as_freed(layer, run):
    """The least recently used entry is pinned: others have to go until the size is met."""
    write_plan(layer, "a.json", {"keys": [ITEMS[0].key.path]})

    result = run(max_size=2 * entry_size(layer) + 100)

    assert left(layer) == keys([ITEMS[0], ITEMS[3]])
    assert (result.kept, result.pinned) == (2, 1)


def test_a_later_layout_is_no_old_one(layer, run):
    (layer.root / "artifacts-v2").mkdir()

    assert run(old_layouts=True).removed == ()
    assert (layer.root / "artifacts-v2").exists()


def test_plans_that_cannot_be_read_now_keep_everything(layer, run, monkeypatch):
    write_plan(layer, "a.json", {"keys": [ITEMS[0].key.path]})
    real = os.read

    def failing(descriptor, size):
        if "plans-v1" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, size)

    monkeypatch.setattr("jitspark.cache.folders.os.read", failing)
    with pytest.raises(CacheDirectoryError, match="plans-v1"):
        run(max_size=0)

    assert left(layer) == keys(ITEMS)


def test_an_entry_that_goes_while_it_is_verified_is_not_bad(layer, run, monkeypatch):
    monkeypatch.setattr("cache_tools.verify.keys_in", lambda layer: [*keys_in(layer), *(run(max_size=0) and ())])

    assert (verify([layer]).entries, verify([layer]).bad) == (0, ())


@pytest.mark.parametrize(("seconds", "known"), [(0.0, True), (590.0, True), (610.0, False), (-20.0, False)])
def test_a_failure_counts_for_ten_minutes_and_not_after_the_clock_went_back(layer, monkeypatch, seconds, known):
    now = time.time()
    monkeypatch.setattr("jitspark.cache.failures.time.time", lambda: now)
    remember_failure(layer, ITEMS[0].key, "0" * 64, CompileError(where="a", found="b", needed="c", remedy="d"))
    now += seconds

    assert (remembered_failure(layer, ITEMS[0].key, "0" * 64) is not None) is known
