"""Plans travel with the entries that they need, are read as plans on the way, and choose what is packed."""

from dataclasses import replace

import pytest
from pack_fixtures import (
    everything_below,
    filled,
    listed_as_they_are,
    make_keys,
    members_of,
    refused,
    replace_size,
    step_of,
    store_plan,
    unpack,
    write_pack,
    write_tar,
)

from cache_tools.merge import merge
from cache_tools.pack import Form, pack
from cache_tools.plan_files import belongs, chosen, plans_in, served_by
from cache_tools.shipping import everything
from cache_tools.signed_layers import unsigned_files
from cache_tools.signing import ANY, trust_in
from cache_tools.sources import read_source
from cache_tools.unpack import unpack as unpack_trusting
from cache_tools.verify import verify
from jitspark.cache.store import Layer, keys_in
from jitspark.errors import PackError, UsageError
from jitspark.plans.plan import Stage
from jitspark.settings import Settings

PLACE = "plans-v1"


@pytest.fixture
def cache(tmp_path, templates):
    """Three entries, a plan of two of them for 8 rows, and one of all for 16."""
    entries = filled(tmp_path / "cache", templates, 2, 1)
    store_plan(tmp_path / "cache", step_of(entries[:2], 8))
    store_plan(tmp_path / "cache", step_of(entries, 16))
    return Layer(tmp_path / "cache", writable=True)


@pytest.fixture
def settings(cache):
    return Settings(cache_dir=cache.root)


def packed(file, settings, form=None):
    found = everything(settings)
    return pack(file, found.entries, None, form or Form(), found.plans)


def plans_below(root):
    return {path: content for path, content in everything_below(root).items() if path.startswith(PLACE)}


def test_plans_go_where_their_entries_go(tmp_path, cache, settings, layer):
    done = packed(tmp_path / "x.tar.zst", settings)

    assert (done.entries, done.plans) == (3, 2)
    assert unpack(tmp_path / "x.tar.zst", layer) == (3, 0)
    assert plans_below(layer.root) == plans_below(cache.root)
    assert len(plans_below(layer.root)) == 2
    assert (verify([layer]).plans, verify([layer]).bad) == (2, ())


def test_a_directory_holds_them_too(tmp_path, cache, settings):
    packed(tmp_path / "layer", settings, Form("dir"))

    assert plans_below(tmp_path / "layer") == plans_below(cache.root)


def test_a_plan_whose_entries_are_not_packed_stays(cache):
    keys = {entry.key for entry in everything(Settings(cache_dir=cache.root)).entries}
    stubs = {key for key in keys if key.kernel == "stub"}

    for offered, rows in ((keys, [8, 16]), (stubs, [8]), (keys - stubs, []), (set(), [])):
        assert sorted(each.plan.rows for each in served_by(plans_in([cache]), offered)) == rows


def test_a_good_plan_is_never_overwritten_and_a_damaged_one_is(tmp_path, cache, settings, layer):
    packed(tmp_path / "x.tar.zst", settings)
    first, second = sorted(path for path in plans_below(cache.root))
    mine = store_plan(layer.root, step_of(everything(settings).entries[:1], 24)).read_bytes()
    for path, content in ((first, mine), (second, b"damaged")):
        (layer.root / path).write_bytes(content)

    unpack(tmp_path / "x.tar.zst", layer)

    assert (layer.root / first).read_bytes() == mine
    assert (layer.root / second).read_bytes() == (cache.root / second).read_bytes()


def test_a_damaged_plan_is_said_and_not_packed(tmp_path, cache, settings, warnings):
    path = store_plan(cache.root, step_of(everything(settings).entries, 24))
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])

    assert packed(tmp_path / "x.tar.zst", settings).plans == 2
    assert [str(path) in warning for warning in warnings()] == [True]
    assert [bad.where for bad in verify([cache]).bad] == [str(path)]


def test_a_plan_for_a_target_that_the_pack_has_no_entry_for_is_refused(tmp_path, settings, layer):
    """What a pack needs of a machine is asked of its entries, so none may stand for such a plan."""
    found = everything(settings)
    plan = replace(found.plans[0].plan, target="sm_100a", launches=())
    (tmp_path / "stray").mkdir()
    stray = plans_in([Layer(store_plan(tmp_path / "stray", plan).parents[1], writable=True)])
    pack(tmp_path / "x.tar.zst", found.entries, None, Form(), [*stray])

    assert "a plan for sm_100a" in refused(tmp_path / "x.tar.zst", layer)


class TestChosen:
    def test_by_rows_with_what_a_step_of_so_many_rows_has(self, cache):
        entries = everything(Settings(cache_dir=cache.root)).entries
        rows = {
            Stage.DECODE: (8, 16),
            Stage.LOGITS: (1, 8, 9),
            Stage.DRAFT: (7, 14),
            Stage.DRAFT_CONTEXT: (8, 16),
            Stage.MARKOV: (7, 8),
        }
        plans = [step_of(entries, count, stage) for stage, counts in rows.items() for count in counts]

        assert [(p.stage, p.rows) for p in plans if belongs(p, 8)] == [
            (Stage.DECODE, 8), (Stage.LOGITS, 1), (Stage.LOGITS, 8), (Stage.DRAFT, 7), (Stage.DRAFT_CONTEXT, 8),
            (Stage.MARKOV, 7),
        ]  # fmt: skip

    def test_by_rows_or_by_name(self, cache):
        plans = list(plans_in([cache]))
        eight = next(each for each in plans if each.plan.rows == 8)

        assert chosen(plans, [8], []) == [eight]
        assert chosen(plans, [], [eight.name[:6]]) == [eight]
        assert chosen(plans, [8], [eight.name]) == [eight]
        assert len(chosen(plans, [8, 16], [])) == 2

    @pytest.mark.parametrize(
        ("rows", "names"), [([24], []), ([8, 24], []), ([], ["ffffff"]), ([], ["abc"]), ([], [""])]
    )
    def test_nothing_that_is_not_there(self, cache, rows, names):
        with pytest.raises(UsageError, match=r"--m|--plan"):
            chosen(list(plans_in([cache])), rows, names)


class TestHostile:
    @pytest.fixture
    def members(self, tmp_path, settings):
        packed(tmp_path / "good.tar.zst", settings)
        return members_of(tmp_path / "good.tar.zst")

    def change(self, members, change):
        """The members with the first plan's bytes changed, and a manifest that lists them so."""
        place = next(i for i, (member, _) in enumerate(members) if member.name.startswith(PLACE))
        content = change(members[place][1])
        members[place] = (replace_size(members[place][0], len(content)), content)
        return listed_as_they_are(members)

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            (lambda content: content[:-2], "digest does not match"),
            (lambda content: content.replace(b'"rows":', b'"sows":'), "digest does not match"),
            (lambda _: b"{}", "digest does not match"),
            (lambda _: b"", "digest does not match"),
        ],
    )
    def test_what_is_no_plan_is_refused_and_named(self, tmp_path, members, layer, change, found):
        text = refused(write_pack(tmp_path / "bad.tar.zst", self.change(members, change)), layer)

        assert found in text
        assert f": {PLACE}/" in text

    def test_the_members_that_are_changed_are_accepted_unchanged(self, tmp_path, members, layer):
        assert unpack(write_pack(tmp_path / "same.tar.zst", self.change(members, lambda c: c)), layer) == (3, 0)

    @pytest.mark.parametrize(
        "name", ["x.json", "../x.json", f"{'a' * 64}.txt", f"{'A' * 64}.json", f"x/{'a' * 64}.json"]
    )
    def test_no_other_name_is_taken(self, tmp_path, members, layer, name):
        place = next(i for i, (member, _) in enumerate(members) if member.name.startswith(PLACE))
        members[place][0].name = f"{PLACE}/{name}"

        refused(write_pack(tmp_path / "bad.tar.zst", listed_as_they_are(members)), layer)

    def test_a_plain_tar_brings_none(self, tmp_path, members, layer):
        text = refused(write_tar(tmp_path / "plain.tar", members[1:]), layer)

        assert "a plan in a pack without a manifest" in text


def test_a_merge_is_the_pack_of_the_union(tmp_path, settings):
    found = everything(settings)
    packed(tmp_path / "whole.tar.zst", settings)
    pack(tmp_path / "a.tar.zst", found.entries[:2], None, Form(), found.plans[:1])
    pack(tmp_path / "b.tar.zst", found.entries, None, Form(), found.plans[1:])

    merge(tmp_path / "m.tar.zst", [tmp_path / "a.tar.zst", tmp_path / "b.tar.zst"], ANY, Form(), settings)

    assert (tmp_path / "m.tar.zst").read_bytes() == (tmp_path / "whole.tar.zst").read_bytes()
    assert len(read_source(tmp_path / "m.tar.zst", ANY, settings).plans) == 2


def test_a_merge_leaves_out_plans_whose_entries_are_gone(tmp_path, cache, settings, layer):
    found = everything(settings)
    store_plan(cache.root, replace(found.plans[0].plan, target="sm_100a", launches=()))
    packed(tmp_path / "whole.tar.zst", settings)

    merge(tmp_path / "m.tar.zst", [cache.root], ANY, Form(), settings)

    assert (tmp_path / "m.tar.zst").read_bytes() == (tmp_path / "whole.tar.zst").read_bytes()
    assert unpack(tmp_path / "m.tar.zst", layer) == (3, 0)


def test_two_plans_of_one_name_are_refused(tmp_path, settings):
    found = everything(settings)
    forged = replace(found.plans[0], content=found.plans[1].content)

    with pytest.raises(PackError, match="one plan for one name"):
        pack(tmp_path / "x", found.entries, None, Form(), [*found.plans, forged])


def test_a_signature_covers_plans_and_one_made_later_is_not(tmp_path, settings, layer):
    private, public = make_keys(tmp_path)
    packed(tmp_path / "x.tar.zst", settings, Form(sign=private))
    trust = trust_in([public], allow_unsigned=False)
    unpack_trusting(tmp_path / "x.tar.zst", layer, trust)

    assert list(unsigned_files([layer], trust)) == []
    later = store_plan(layer.root, step_of(everything(settings).entries, 64))
    assert [bad.where for bad in unsigned_files([layer], trust)] == [str(later)]
    assert len(list(keys_in(layer))) == 3
