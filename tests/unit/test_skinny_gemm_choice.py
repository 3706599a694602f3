"""The tilings that skinny_gemm_bf16 chooses: each fits the hardware and covers its shape, whatever the deployment."""

import pytest

from jitspark.geometry import deployment, geometry_names, load_geometry
from jitspark.spec import Specialization
from kernel_specs.skinny_gemm_bf16.spec import SPEC, Projection, projections, specializations
from kernel_specs.skinny_gemm_bf16.tiling import MAX_STAGES, MAX_TOKENS, SPLITS, Tiling, choose

SHARED_BYTES_OF_A_CTA = 227 * 1024  # Hopper and Blackwell
MAX_BOX_ROWS = 256  # of a bulk tensor copy
DEPLOYMENTS = [(name, tp) for name in geometry_names() for tp in load_geometry(name).tp_sizes]


def tiling_of(specialization: Specialization) -> Tiling:
    statics = {name: value for name, value in specialization.statics.items() if name != "epilogue"}
    return Tiling(**specialization.axes, **statics)


@pytest.fixture(params=DEPLOYMENTS, ids=lambda pair: f"{pair[0]}-tp{pair[1]}")
def tilings(request):
    return [tiling_of(each) for each in specializations(deployment(*request.param))]


def test_every_tiling_fits_a_multiprocessor(tilings):
    for tile in tilings:
        assert tile.shared_bytes <= SHARED_BYTES_OF_A_CTA, tile
        assert (tile.consumers + 1) * 32 <= 1024, tile
        assert max(tile.half_rows, tile.max_tokens, tile.blocks) <= MAX_BOX_ROWS, tile


def test_every_weight_is_read_once_and_whole(tilings):
    for tile in tilings:
        assert tile.split * tile.chunks * tile.tile_columns == tile.in_features, tile
        assert (tile.row_tiles - 1) * tile.half_rows < tile.out_features <= tile.row_tiles * tile.half_rows, tile


def test_every_row_block_has_a_warp_and_every_sum_an_owner(tilings):
    for tile in tilings:
        assert tile.warp_blocks * tile.row_warps * 16 >= tile.half_rows, tile
        assert tile.owned_items * tile.split == tile.items, tile


def test_no_group_of_warps_is_idle(tilings):
    for tile in tilings:
        assert tile.column_warps <= tile.chunks, tile


def test_large_weights_spread_over_all_multiprocessors(tilings):
    for tile in tilings:
        if tile.weight_rows * tile.in_features >= 8192 * 1024:
            assert tile.row_tiles * tile.split >= 104, tile


def test_each_deployment_asks_for_no_specialization_twice():
    for pair in DEPLOYMENTS:
        found = [each.title() for each in specializations(deployment(*pair))]
        assert len(found) == len(set(found)), pair


def test_every_row_count_of_the_step_is_served():
    made = deployment("muse_spark_open", 8)
    for projection in projections(made).values():
        for rows in {*made.backbone_rows, *made.draft_query_rows, *made.draft_context_rows}:
            projection.specialize(rows).check({"num_tokens": rows})


@pytest.mark.parametrize("in_features", [64, 192, 256, 1536, 40960])
@pytest.mark.parametrize("weight_rows", [1, 7, 256, 12628, 202048])
@pytest.mark.parametrize("max_tokens", MAX_TOKENS)
def test_any_shape_of_whole_blocks_gets_a_tiling_the_spec_offers(weight_rows, in_features, max_tokens):
    tile = choose(weight_rows, weight_rows, in_features, max_tokens)

    assert tile.split in SPLITS
    assert tile.stages <= MAX_STAGES
    SPEC.specialize(
        axes={"weight_rows": weight_rows, "out_features": weight_rows, "in_features": in_features},
        statics={"epilogue": "store", **tile.statics()},
    )


def test_gate_and_up_rows_share_a_tile():
    tile = tiling_of(Projection(2048, 512, "silu_mul").specialize(8))

    assert tile.halves == 2
    assert tile.half_rows % 16 == 0
