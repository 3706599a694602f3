"""What plans ask of exchanges that come in several ways: the memory of the one that is chosen for so many rows."""

import pytest

from jitspark.geometry import deployment
from jitspark.plans.backbone import decode_plan
from jitspark.plans.builder import Keys
from jitspark.plans.plan import Kind
from jitspark.registry import specializations
from kernel_specs.allreduce_gated_residual_rmsnorm.spec import shots_for

TARGET = "sm_90a"
KEYS = Keys(TARGET)
REDUCE = "allreduce_gated_residual_rmsnorm"
INBOXES = {1: ("inbox",), 2: ("row_inbox", "sum_inbox")}


@pytest.mark.parametrize(("tp", "rows", "shots"), [(8, 24, 1), (8, 32, 2), (8, 64, 2), (16, 64, 2), (4, 64, 1)])
def test_an_all_reduce_has_the_inboxes_that_its_number_of_shots_asks_for(tp, rows, shots):
    plan = decode_plan(deployment("muse_spark_open", tp), rows, TARGET, keys=KEYS)

    launches = [launch for launch in plan.launches if launch.operation == REDUCE]
    buffers = plan.buffer_named()
    used = {each.buffer for launch in launches for each in launch.tensors()}

    assert {launch.statics["shots"] for launch in launches} == {shots}
    symmetric = {name for name in used if buffers[name].kind is Kind.SYMMETRIC}
    assert symmetric == {f"post_attention.{name}" for name in INBOXES[shots]}
    addressed = {buffers[name].of for name in used if buffers[name].kind is Kind.PEERS}
    assert addressed == symmetric


def test_many_rows_are_summed_in_two_shots_where_many_ranks_share_a_wide_row():
    assert [shots_for(8192, rows, 8) for rows in (8, 24, 32, 64)] == [1, 1, 2, 2]
    assert shots_for(8192, 64, 16) == 2
    assert {shots_for(8192, 64, 4), shots_for(8192, 64, 2), shots_for(512, 64, 8)} == {1}
    for tp, wanted in ((4, {1}), (8, {1, 2})):
        asked = specializations(deployment("muse_spark_open", tp), [REDUCE])
        assert {each.statics["shots"] for each in asked} == wanted
