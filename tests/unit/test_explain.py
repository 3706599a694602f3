"""Why a miss: the nearest entry and where it differs; and which entry a short name means."""

from collections import Counter

import pytest
import stub_cache

from cache_tools.difference import differences, leaves, nearest
from cache_tools.entries import entries_in, entries_named
from cache_tools.parts import parts, parts_json
from jitspark.cache.store import Layer
from jitspark.errors import UsageError
from jitspark.explain import explain, explanation_json, explanation_lines
from jitspark.key import plain


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """Entries of 20 stub kernels for one target, and of one for another target."""
    templates = stub_cache.make_templates(tmp_path_factory.mktemp("templates"))
    items = [*stub_cache.wanted(20), *stub_cache.wanted(1, target="sm_100a"), *stub_cache.wanted(1, kernel="other")]
    root = tmp_path_factory.mktemp("cache") / "root"
    stub_cache.fill(root, items, templates, stub_cache.other_toolchain())
    return Layer(root, writable=True)


def test_each_differing_leaf_is_named_with_both_values():
    stored = {"axes": {"n": 1, "m": 2}, "sources": {"kernel_specs/a/kernel.py": "0" * 64}, "options": ["x"]}
    wanted = {"axes": {"n": 1, "m": 3}, "sources": {"kernel_specs/a/kernel.py": "1" * 64}, "options": ["x", "y"]}

    assert [str(each) for each in differences(stored, wanted)] == [
        "axes.m: stored 2, wanted 3",
        "options[1]: stored (absent), wanted 'y'",
        "sources.kernel_specs/a/kernel.py: stored 000000000000, wanted 111111111111",
    ]


@pytest.mark.parametrize(("stored", "wanted"), [(1, True), (1, plain(1.0)), ("1", 1), (None, False)])
def test_values_of_other_types_differ(stored, wanted):
    assert differences({"a": stored}, {"a": wanted})
    assert not differences({"a": stored}, {"a": stored})


def test_arguments_go_by_name_and_floats_are_shown_as_numbers():
    value = {"args": [{"name": "x", "align": 16}, {"name": "y", "align": 8}], "scale": plain(0.5)}

    assert dict(leaves(value)) == {
        "args.x.name": "x",
        "args.x.align": 16,
        "args.y.name": "y",
        "args.y.align": 8,
        "scale": 0.5,
    }


def test_a_choice_that_a_recipe_holds_twice_is_said_once():
    stored = {"statics": {"threads": 1}, "spec": {"factory_arguments": {"threads": 1, "lost": 1}}}
    wanted = {"statics": {"threads": 2}, "spec": {"factory_arguments": {"threads": 2}}}

    assert [each.field for each in differences(stored, wanted)] == ["spec.factory_arguments.lost", "statics.threads"]


def test_the_nearest_entry_differs_in_the_fewest_leaves(layer):
    (item,) = stub_cache.wanted(1, start=77)
    entry, found = nearest(plain(item.recipe), list(entries_in([layer], kernels={"stub"})))

    assert entry.key.target == item.key.target
    assert [(each.field, each.wanted) for each in found] == [("axes.n", 77)]


def test_hits_and_misses_of_a_kernel(layer):
    hit, miss = explain([*stub_cache.wanted(1), *stub_cache.wanted(1, start=99)], [layer])
    text = "\n".join(explanation_lines([hit, miss]))

    assert [entry.where.startswith(str(layer.root)) for entry in hit.entries] == [True]
    assert not miss.entries and len(miss.differences) == 1
    assert ", wanted 99" in text and "1 hits, 1 misses" in text
    assert [each["hit"] for each in explanation_json([hit, miss])] == [True, False]


def test_a_kernel_without_entries_says_so(layer):
    (found,) = explain(stub_cache.wanted(1, kernel="unheard_of"), [layer])

    assert found.nearest is None
    assert any("no entry of unheard_of" in line for line in explanation_lines([found]))


def test_a_key_is_named_by_its_start_its_path_or_its_text(layer):
    entry = next(entries_in([layer]))
    digest = entry.key.recipe
    names = (digest, digest[:12], f"{entry.key.kernel}/{digest[:12]}", entry.where, f"{entry.where}/kernel.so")

    assert [[found.key for found in entries_named(name, [layer])] for name in names] == [[entry.key]] * len(names)


@pytest.mark.parametrize("name", ["", "zz", "0" * 64, "kernel.so", "/", "other/ffffffffffff"])
def test_a_name_that_means_no_key_is_refused(layer, name):
    with pytest.raises(UsageError, match="ls --entries"):
        entries_named(name, [layer])


def test_a_name_that_means_several_keys_lists_them(layer):
    starts = Counter(entry.key.recipe[0] for entry in entries_in([layer]))
    start, count = starts.most_common(1)[0]

    assert count > 1  # 22 keys, 16 digits
    with pytest.raises(UsageError, match=f"which means {count} keys: "):
        entries_named(start, [layer])


def test_the_parts_of_a_key_are_all_its_recipe_and_its_artifact(layer):
    (entry,) = entries_named(next(entries_in([layer])).key.recipe, [layer])
    text = "\n".join(parts([entry]))
    value = parts_json([entry])

    assert all(f"{field}: " in text for field, _ in leaves(entry.record.recipe))
    assert entry.record.sha256 in text and entry.where in text
    assert value["recipe"] == entry.record.recipe and value["entries"][0]["sha256"] == entry.record.sha256
