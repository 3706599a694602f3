"""Shares of routed experts: what a plan reads is what is held, and a layout that is not known is refused by name."""

import sys
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from expert_checkpoint import Experts, differing, write  # noqa: E402
from expert_ranks import empty_layer, load  # noqa: E402

from jitspark.errors import DeviceMemoryError, WeightsError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.backbone import decode_plan  # noqa: E402
from jitspark.plans.plan import Kind  # noqa: E402
from jitspark.runtime.expert_forms import ExpertSizes, form_of  # noqa: E402
from jitspark.runtime.expert_sources import PROCESSED_FLAG  # noqa: E402
from jitspark.runtime.expert_tp import ExpertShares  # noqa: E402
from jitspark.runtime.ranks import RankGroup  # noqa: E402

EXPERTS = Experts(8, 256, 256, "nvfp4", bf16_layers=(0,))
ALONE = RankGroup(0, 1)
LAYERS = (0, 1)


@pytest.fixture
def checkpoint(tmp_path):
    write(tmp_path / "experts.safetensors", EXPERTS, LAYERS)
    return tmp_path / "experts.safetensors"


def loaded(path, index):
    layer = empty_layer(EXPERTS, index)
    load(layer, path, index)
    return layer


def parallel(layer, **values):
    vars(layer.moe_config.moe_parallel_config).update(values)


def fill(layer, name, value):
    getattr(layer, name).data.view(-1)[-1:].fill_(value)


def fill_byte(layer, name, value):
    getattr(layer, name).data.view(torch.uint8).view(-1)[-1:].fill_(value)


def _round_robin(layer):
    parallel(layer, use_ep=True, ep_size=2, ep_rank=0)
    layer.expert_placement_strategy = "round_robin"


def _padded(layer):
    layer.w2_weight = torch.nn.Parameter(torch.zeros(8, 384, 128, dtype=torch.uint8), requires_grad=False)


def _of_dtype(layer):
    scales = layer.w13_weight_scale.data.view(torch.uint8)
    layer.w13_weight_scale = torch.nn.Parameter(scales, requires_grad=False)


@pytest.mark.parametrize("tp", [4, 8, 16])
def test_a_layers_shares_are_what_its_plan_reads(tp):
    muse = deployment("muse_spark_open", tp)
    experts, sizes = muse.backbone.experts, ExpertSizes.of(muse.backbone.experts, tp)
    plan = decode_plan(muse, 8, "sm_100a")

    for index, dtype in ((0, "bfloat16"), (1, "nvfp4")):
        prefix = f"layers.{index}.experts."
        buffers = [each for each in plan.buffers if each.kind is Kind.WEIGHT and each.name.startswith(prefix)]
        wanted = {each.name.removeprefix(prefix): (each.shape, f"torch.{each.dtype}") for each in buffers}
        held = {name: (each.shape, str(each.dtype)) for name, each in form_of(dtype, sizes).held.items()}
        assert held == wanted
        assert (dtype == "bfloat16") == (index in experts.bf16_layers)


class TestRefused:
    CASES = (
        (
            "another method",
            lambda layer: setattr(layer, "quant_method", SimpleNamespace()),
            "the method SimpleNamespace",
        ),
        ("another placement", _round_robin, "expert_placement_strategy 'round_robin'"),
        ("experts that move", lambda layer: parallel(layer, enable_eplb=True), "enable_eplb"),
        ("another group", lambda layer: parallel(layer, tp_size=2), "rank 0 of 2"),
        ("shapes that were padded", _padded, "w2_weight (8, 384, 128) uint8"),
        ("another dtype", _of_dtype, "w13_weight_scale (8, 512, 16) uint8"),
        ("no block scales", lambda layer: delattr(layer, "w2_weight_scale"), "no w2_weight_scale"),
        ("a block scale that is NaN", lambda layer: fill_byte(layer, "w13_weight_scale", 0xFF), "no w13_weight_scale"),
        ("a weight scale that is NaN", lambda layer: fill(layer, "w2_weight_scale_2", float("nan")), "weight_scale_2"),
        ("an input scale of zero", lambda layer: fill(layer, "w2_input_scale", 0.0), "no w2_input_scale"),
        ("an input scale without end", lambda layer: fill(layer, "w13_input_scale", float("inf")), "w13_input_scale"),
    )

    @pytest.mark.parametrize(("spoil", "found"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
    def test_with_the_layer_and_what_was_found(self, checkpoint, spoil, found):
        layer, shares = loaded(checkpoint, 1), ExpertShares(EXPERTS, LAYERS, ALONE)
        spoil(layer)

        with pytest.raises(WeightsError) as raised:
            shares.take(1, layer)

        assert raised.value.where == "layer 1, routed experts"
        assert found in raised.value.found

    def test_a_layer_of_another_dtype_than_the_geometry_says(self, checkpoint):
        shares = ExpertShares(EXPERTS, LAYERS, ALONE)

        with pytest.raises(WeightsError, match=r"MuseSparkUnquantizedFusedMoE; needed MuseSparkModelOptNvFp4FusedMoE"):
            shares.take(1, loaded(checkpoint, 0))

    def test_weights_that_come_post_processed(self, checkpoint, monkeypatch):
        module, function = PROCESSED_FLAG
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(**{function: lambda: True}))

        with pytest.raises(WeightsError, match="post-processed before they were loaded"):
            ExpertShares(EXPERTS, LAYERS, ALONE).take(1, loaded(checkpoint, 1))

    @pytest.mark.parametrize(
        ("sizes", "found"),
        [
            ((6, 256, 256), "6 experts on 4 ranks"),
            ((8, 256, 258), "258 outputs of an expert on 4 ranks"),
            ((8, 256, 256), "64 outputs of an expert on a rank"),
            ((8, 192, 512), "192 columns of the experts"),
        ],
    )
    def test_sizes_that_ranks_cannot_share(self, sizes, found):
        with pytest.raises(WeightsError) as raised:
            ExpertShares(Experts(*sizes), [0], RankGroup(0, 4))
        assert raised.value.found == found

    def test_less_memory_than_is_needed(self, checkpoint):
        shares = ExpertShares(EXPERTS, LAYERS, ALONE, reserve_bytes=1 << 30, free_bytes=lambda _: 1 << 30)

        with pytest.raises(DeviceMemoryError, match=r"on cpu: found 1\.0 GiB free; needed 1\.1 GiB"):
            shares.take(0, loaded(checkpoint, 0))

    def test_a_layer_that_nobody_post_processed(self, checkpoint):
        shares = ExpertShares(EXPERTS, LAYERS, ALONE)
        shares.take(0, loaded(checkpoint, 0))

        with pytest.raises(WeightsError, match=r"no weights of layers \[1\]"):
            shares.finish()


class TestTap:
    def test_takes_what_was_loaded_before_stock_spoils_it(self, checkpoint):
        layer = empty_layer(EXPERTS, 1)
        shares = ExpertShares(EXPERTS, [1], ALONE)
        shares.tap({1: layer})
        load(layer, checkpoint, 1)

        layer.quant_method.process_weights_after_loading(layer)

        assert differing(checkpoint, 1, 0, 1, shares.tensors(1)) == []
        assert not layer.w13_weight.any()

    def test_notices_scales_that_nothing_was_loaded_into(self, checkpoint):
        layer = empty_layer(EXPERTS, 1)
        ExpertShares(EXPERTS, [1], ALONE).tap({1: layer})
        load(layer, checkpoint, 1, lacks="w2_input_scale")

        with pytest.raises(WeightsError, match="no w2_input_scale from the checkpoint"):
            layer.quant_method.process_weights_after_loading(layer)

    def test_leaves_other_layers_alone(self):
        tapped, other = empty_layer(EXPERTS, 1), empty_layer(EXPERTS, 1)

        ExpertShares(EXPERTS, [1], ALONE).tap({1: tapped})

        assert "process_weights_after_loading" in vars(tapped.quant_method)
        assert "process_weights_after_loading" not in vars(other.quant_method)

    def test_taking_a_layer_again_writes_to_the_same_memory(self, checkpoint):
        shares = ExpertShares(EXPERTS, [1], ALONE)
        shares.take(1, empty_layer(EXPERTS, 1))
        before = {name: tensor.data_ptr() for name, tensor in shares.tensors(1).items()}

        shares.take(1, loaded(checkpoint, 1))

        assert {name: tensor.data_ptr() for name, tensor in shares.tensors(1).items()} == before
        assert differing(checkpoint, 1, 0, 1, shares.tensors(1)) == []


@pytest.mark.parametrize("index", LAYERS)
def test_one_changed_bit_of_a_share_is_seen(checkpoint, index):
    """What the process tests rest on."""
    shares = ExpertShares(EXPERTS, LAYERS, ALONE)
    shares.take(index, loaded(checkpoint, index))
    for name, tensor in shares.tensors(index).items():
        tensor.view(torch.uint8).view(-1)[-1] ^= 1
        assert differing(checkpoint, index, 0, 1, shares.tensors(index)) == [name]
        tensor.view(torch.uint8).view(-1)[-1] ^= 1
