"""How router_pooler_gemm is cut: whatever the deployment, its CTAs find the room that their number rests on."""

from types import SimpleNamespace

import pytest

from jitspark.geometry import deployment, geometry_names, load_geometry
from kernel_specs.router_gemm.share import SLAB
from kernel_specs.router_pooler_gemm.cut import CTAS, SHARED_BYTES, Cut
from kernel_specs.router_pooler_gemm.spec import SPEC, serves, specializations

DEPLOYMENTS = [(name, tp) for name in geometry_names() for tp in load_geometry(name).tp_sizes]
CLUSTERS_OF_8 = 47  # that an H200 holds with three CTAs on a multiprocessor


def cut_of(specialization):
    sizes = {**specialization.axes, **specialization.statics}
    return Cut(**{name: sizes[name] for name in Cut.__dataclass_fields__ if name in sizes})


@pytest.fixture(params=DEPLOYMENTS, ids=lambda pair: f"{pair[0]}-tp{pair[1]}")
def cuts(request):
    return [cut_of(each) for each in specializations(deployment(*request.param))]


def test_as_many_ctas_fit_on_a_multiprocessor_as_are_asked_for(cuts):
    for cut in cuts:
        partials = 0 if cut.reuse else cut.partial_bytes
        barriers = 16
        assert CTAS * (cut.ring_bytes + cut.received_bytes + partials + barriers + 1024) <= SHARED_BYTES, cut


def test_sums_that_lie_over_the_weights_have_room_there(cuts):
    for cut in cuts:
        assert not cut.reuse or cut.partial_bytes <= cut.ring_bytes, cut


def test_every_row_and_column_has_a_cta(cuts):
    for cut in cuts:
        assert cut.columns * cut.split == cut.hidden_size and cut.slabs * SLAB == cut.columns
        assert cut.router_tiles * 16 >= cut.num_experts and cut.pooler_tiles * cut.pooler_rows == cut.pooled_width
        assert all(share.owned * cut.split == share.items for share in (cut.router, cut.pooler))


@pytest.mark.parametrize("tp", [8, 16])
def test_all_clusters_of_the_real_model_are_resident_at_once(tp):
    cuts = [cut_of(each) for each in specializations(deployment("muse_spark_open", tp))]
    assert [cut.max_tokens for cut in cuts] == [8, 16]
    for cut in cuts:
        assert cut.split == 8 and cut.router_tiles + cut.pooler_tiles <= CLUSTERS_OF_8


def test_at_tp_4_a_cluster_more_than_run_at_once_leaves_it_to_two_launches():
    assert not list(specializations(deployment("muse_spark_open", 4)))


def sized(hidden_size, moe_hidden_size=4096, tp=8):
    experts = SimpleNamespace(num_local_experts=256, moe_hidden_size=moe_hidden_size)
    return SimpleNamespace(tp=tp, backbone=SimpleNamespace(hidden_size=hidden_size, experts=experts))


@pytest.mark.parametrize(
    ("made", "served"),
    [
        (sized(8192), True),
        (sized(7168), False),  # a quarter of it is more than a CTA has room for
        (sized(16384), False),
        (sized(8192 + 256), False),  # two CTAs cannot share it in slabs
        (sized(8192, 4096 + 8 * 8), False),  # no whole row blocks
    ],
)
def test_what_cannot_be_cut_is_left_to_two_launches(made, served):
    assert [len(list(specializations(made))), serves(made, 8)] == [2 * served, served]
    assert not serves(made, 24)
    for each in specializations(made):
        cut_of(each)


def test_cases_lay_sums_over_weights_and_beside_them():
    assert {cut_of(SPEC.specialize_case(case)).reuse for case in SPEC.cases} == {False, True}
