"""Who serves the launches that our kernels do not, and what is refused."""

import pytest

torch = pytest.importorskip("torch")

from jitspark.errors import UsageError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.backbone import decode_plan  # noqa: E402
from jitspark.runtime.parts import PARTS, STOCK  # noqa: E402
from jitspark.runtime.provider_operations import provider_operations  # noqa: E402


def plan_of(name, tp, **providers):
    return decode_plan(deployment(name, tp), 8, "sm_90a", providers=providers)


def test_our_kernels_need_no_operations():
    assert provider_operations([plan_of("tiny", 1)], "cpu") == {}


@pytest.mark.parametrize(("name", "tp"), [("tiny", 1), ("tiny_swa", 2)])
def test_every_launch_that_is_stock_has_an_operation(name, tp):
    served = [part for part in PARTS if tp == 1 or part != "all_reduce"]
    plan = plan_of(name, tp, **dict.fromkeys(served, STOCK))

    found = provider_operations([plan], "cpu")

    asked = {(each.provider, each.operation) for each in plan.launches if each.provider == STOCK}
    assert len(asked) > 8
    assert asked <= found.keys()


def test_stock_nvfp4_experts_are_refused():
    plan = plan_of("muse_spark_open", 8, experts=STOCK)

    with pytest.raises(UsageError, match="NVFP4"):
        provider_operations([plan], "cpu")


def test_stock_exchanges_are_refused_because_they_reach_no_other_rank():
    with pytest.raises(UsageError, match=r'\["all_reduce"\].*stock.*above TP 1'):
        provider_operations([plan_of("tiny_swa", 2, all_reduce=STOCK)], "cpu")


@pytest.mark.parametrize(("part", "lacks"), [("experts", "no experts that"), ("all_reduce", "no gated residual")])
def test_a_part_that_flashinfer_does_not_serve_is_refused_with_what_it_lacks(part, lacks):
    with pytest.raises(UsageError, match=rf'\["{part}"\].*flashinfer \({lacks}'):
        provider_operations([plan_of("tiny_swa", 2, **{part: "flashinfer"})], "cpu")


def test_flashinfer_that_is_not_there_says_which_is_needed():
    with pytest.raises(UsageError, match="flashinfer-python"):
        provider_operations([plan_of("tiny", 1, attention="flashinfer")], "cpu")
