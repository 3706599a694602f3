"""What takes the place of exchanges over torch.distributed: which launches, and with which kernels."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("msgspec")

from bench.check_distributed import COMBINE, deployments, packed_of, wanted_by  # noqa: E402
from jitspark.errors import MissingEntriesError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.draft import draft_plan  # noqa: E402
from jitspark.runtime.distributed_exchanges import EXCHANGES, gathered_first  # noqa: E402

SERVED, ROWS = next(iter(deployments(2)))
TARGET = "sm_90a"


def kernels_of(wanted):
    return {each.key: SimpleNamespace(function=lambda *_: None) for each in wanted}


def replaced(plan, served, kernels):
    """Launches that something else than their kernel serves."""
    instead = gathered_first(plan, served, kernels, lambda own: own[None])
    kernel = object()
    return [launch for launch in plan.launches if instead(launch, kernel) is not kernel]


def test_all_exchanges_and_nothing_else_wait_for_a_gather():
    packed = packed_of(SERVED, ROWS, TARGET)
    found = replaced(packed.plan, SERVED, kernels_of(wanted_by(SERVED, packed)))

    assert found == [launch for launch in packed.plan.launches if launch.operation in EXCHANGES]
    assert any(launch.operation == "expert_reduce_rmsnorm_combine" for launch in found)


def test_the_drafts_exchanges_need_no_other_kernel():
    served = deployment("tiny", 2)
    plan = draft_plan(served, 7, TARGET)

    assert replaced(plan, served, {}) == [launch for launch in plan.launches if launch.operation in EXCHANGES] != []


def test_a_plan_of_one_rank_stays_as_it_is():
    served = deployment("tiny", 1)

    assert replaced(packed_of(served, ROWS, TARGET).plan, served, {}) == []


def test_partial_rows_without_the_kernel_that_combines_them_are_refused_before_anything_runs():
    packed = packed_of(SERVED, ROWS, TARGET)
    kernels = kernels_of(each for each in wanted_by(SERVED, packed) if each.key.kernel != COMBINE)

    with pytest.raises(MissingEntriesError, match="no kernel for expert_combine_rmsnorm"):
        replaced(packed.plan, SERVED, kernels)
