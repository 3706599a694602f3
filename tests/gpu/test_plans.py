"""Whole decode steps on this machine's GPU, as `bin/check-plans` does them, from the usual cache.

Plans of the tiny geometries, whose kernels `bin/make-decode-pack` compiles into that cache. What is missing skips.
"""

import functools

import pytest

torch = pytest.importorskip("torch")

from bench import machine  # noqa: E402
from bench.check_plans import LENGTHS, NUMBERS  # noqa: E402
from jitspark.checking.packed import load_keys  # noqa: E402
from jitspark.checking.plan_check import Bench, launch_by_launch, quiet, replayed, side_by_side  # noqa: E402
from jitspark.errors import MissingEntriesError  # noqa: E402
from jitspark.settings import from_environment  # noqa: E402

DEPLOYMENTS = [("tiny", 1), ("tiny_swa", 1), ("tiny_swa", 2)]


@functools.cache
def bench_of(name, tp, rows):
    geometry = pytest.importorskip("jitspark.geometry")  # which a machine for checks alone need not have
    from jitspark.plans.backbone import decode_plan

    plan = decode_plan(geometry.deployment(name, tp), rows, machine.own_target())
    root = from_environment().cache_dir
    try:
        kernels = load_keys(root, plan.keys())
    except MissingEntriesError:
        pytest.skip(f"{root} has no entries for this GPU's plans: bin/make-decode-pack makes them")
    generator = torch.Generator(device="cuda")
    generator.seed()
    return Bench.draw(plan, kernels, LENGTHS[: rows // plan.query_length], generator, NUMBERS)


def says_nothing(outcome):
    assert outcome.passed, "\n".join([outcome.title, *outcome.problems])


@pytest.mark.parametrize("rows", [8, 24])
@pytest.mark.parametrize(("name", "tp"), DEPLOYMENTS)
def test_every_launch_does_what_its_reference_does(name, tp, rows):
    says_nothing(launch_by_launch(bench_of(name, tp, rows)))


@pytest.mark.parametrize(("name", "tp"), DEPLOYMENTS)
def test_a_captured_replay_gives_the_bits_of_an_eager_run(name, tp):
    says_nothing(replayed(bench_of(name, tp, 24)))


@pytest.mark.parametrize(("name", "tp"), DEPLOYMENTS)
def test_a_run_neither_allocates_nor_waits(name, tp):
    says_nothing(quiet(bench_of(name, tp, 24)))


@pytest.mark.parametrize(("name", "tp"), DEPLOYMENTS)
def test_two_executors_on_two_streams_do_not_disturb_each_other(name, tp):
    says_nothing(side_by_side(bench_of(name, tp, 24), bench_of(name, tp, 8)))
