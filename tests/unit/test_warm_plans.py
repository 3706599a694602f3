"""`jitspark warm` stores the plans of what it warms, once."""

import os

import pytest

from jitspark.cache.store import PLANS, Layer
from jitspark.cli.selection import Selection
from jitspark.cli.warm_plans import PlanCounts, warm_plans
from jitspark.plans.plan import Stage
from jitspark.plans.planning import Plans, Served
from jitspark.settings import from_environment

SELECTION = Selection((1, 2), ("sm_90a",), "tiny")
EVERY = 96 + 40  # of several ranks, logits for whole requests only


@pytest.fixture
def settings(tmp_path):
    return from_environment({"JITSPARK_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)})


def test_the_first_warm_makes_every_plan_and_the_second_none(settings):
    first, second = warm_plans(SELECTION, settings), warm_plans(SELECTION, settings)

    assert first == PlanCounts(made=EVERY)
    assert second == PlanCounts(found=EVERY)
    assert first.line() == f"{EVERY} plans, {EVERY} made, 0 there"
    assert len(os.listdir(settings.cache_dir / PLANS)) == EVERY


def test_a_worker_finds_what_was_warmed(settings):
    warm_plans(SELECTION, settings)
    served = Served("tiny", 2, "sm_90a", {})
    plans = Plans(served, [Layer(settings.cache_dir, writable=False)], may_make=False)

    assert [plans.get(served.request(Stage.DECODE, rows)).rows for rows in (8, 64)] == [8, 64]


def test_a_selection_of_kernels_has_no_plans(settings):
    assert warm_plans(Selection((1,), ("sm_90a",), "tiny", ("rmsnorm",)), settings) is None


def test_a_removed_plan_is_made_again(settings):
    warm_plans(SELECTION, settings)
    os.unlink(settings.cache_dir / PLANS / min(os.listdir(settings.cache_dir / PLANS)))

    assert warm_plans(SELECTION, settings) == PlanCounts(made=1, found=EVERY - 1)


def test_a_cache_that_cannot_be_written_to_lacks_its_plans_and_says_so(settings, tmp_path):
    (tmp_path / "cache").write_text("a file")

    counts = warm_plans(Selection((1,), ("sm_90a",), "tiny"), settings)

    assert counts == PlanCounts(missing=96)
    assert "96 missing: the cache directory cannot be written to" in counts.line()
