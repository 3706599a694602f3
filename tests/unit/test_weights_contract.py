"""The weights contract: each weight of a plan once, its bytes as the model says, and what does not fit is named."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from jitspark.errors import PlanError, WeightsError
from jitspark.geometry import deployment
from jitspark.plans.backbone import decode_plan, logits_plan
from jitspark.plans.builder import Keys
from jitspark.plans.plan import Kind
from jitspark.plans.weights_contract import check, contract, held

TARGET = "sm_90a"
KEYS = Keys(TARGET)
GIGABYTE = 1e9


@pytest.fixture(scope="module")
def needs():
    served = deployment("muse_spark_open", 8)
    return contract(
        [*(decode_plan(served, rows, TARGET, keys=KEYS) for rows in (8, 64)), logits_plan(served, 8, TARGET)]
    )


def tensor(shape, dtype, *, contiguous=True):
    return SimpleNamespace(shape=shape, dtype=f"torch.{dtype}", is_contiguous=lambda: contiguous)


def fitting(needs):
    return {n.name: tensor([s if isinstance(s, int) else 4096 for s in n.shape], n.dtype) for n in needs}


def test_every_weight_is_needed_once_whatever_the_rows(needs):
    names = [need.name for need in needs]

    assert len(names) == len(set(names))
    assert {"rope.cos_sin", "final_norm", "lm_head", "layers.61.experts.down.weight"} <= set(names)
    assert sum(name == "rope.cos_sin" for name in names) == 1
    # per layer 15, and of the experts 8 (NVFP4) or 2; layer 61 hands over to the final norm
    assert len(names) == 62 * 15 + 60 * 8 + 2 * 2 + 3


def test_the_bytes_are_those_of_a_rank_at_tp_8(needs):
    """54.4 GB of NVFP4 experts are held twice, and with them the slices of the two BF16 layers."""
    experts = [need for need in needs if ".experts." in need.name]
    nvfp4 = sum(need.nbytes for need in experts if not need.name.startswith(("layers.0.", "layers.61.")))
    one_bf16_expert = 3 * 4096 * 4096 * 2

    assert nvfp4 == pytest.approx(60 * 256 * 28_311_552 / 8, rel=1e-5)
    assert held(needs).twice == pytest.approx(nvfp4 + 2 * 256 * one_bf16_expert / 8, rel=1e-6)
    # dense parts of 62 layers, the lm_head shard; a table row of 256 bytes and some vectors
    dense = 62 * (37_748_736 + 16_777_216 + 8_388_608 * 3) + 25256 * 8192 * 2
    assert held(needs).shared == pytest.approx(dense, rel=0.01)


def test_each_weight_says_where_it_comes_from(needs):
    source = {need.name: need.source for need in needs}

    assert source["layers.3.qkv_gate"].tensor == "layers.3.self_attn.qkv_proj.weight"
    assert (source["layers.3.pooler"].layout, source["layers.3.pooler"].shared) == ("rows_of_rank", True)
    assert source["rope.cos_sin"].layout == "one_of_all"
    taken = {need.source.tap for need in needs if ".experts." in need.name}
    assert taken == {"checkpoint"}
    assert {need.source.tap for need in needs if ".experts." not in need.name} == {"loaded"}


def test_weights_that_fit_pass(needs):
    check(needs, fitting(needs))


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "found no tensor"),
        (tensor([2304, 8191], "bfloat16"), r"found shape \[2304, 8191\] of bfloat16"),
        (tensor([2304, 8192], "float32"), r"found shape \[2304, 8192\] of float32"),
        (tensor([2304, 8192, 1], "bfloat16"), r"found shape \[2304, 8192, 1\] of bfloat16"),
        (tensor([2304, 8192], "bfloat16", contiguous=False), r"found shape \[2304, 8192\] of bfloat16, not row-major"),
    ],
)
def test_a_weight_that_does_not_fit_is_named_with_what_is_needed(needs, found, text):
    weights = fitting(needs) | {"layers.3.qkv_gate": found}

    needed = r"; needed shape \[2304, 8192\] of bfloat16, row-major"
    where = r"weight layers\.3\.qkv_gate \(layers\.3\.self_attn\.qkv_proj\.weight, as_is\): "
    with pytest.raises(WeightsError, match=where + text + needed):
        check(needs, weights)


def test_plans_of_two_deployments_are_refused():
    one, other = (decode_plan(deployment("tiny", tp), 8, TARGET, keys=KEYS) for tp in (1, 2))

    with pytest.raises(
        PlanError, match=r"weight layers\.0\.qkv_gate: found shape \[640, 512\].*needed shape \[1280, 512\]"
    ):
        contract([one, other])


def test_a_weight_without_a_source_is_its_own():
    plan = decode_plan(deployment("tiny", 1), 8, TARGET, keys=KEYS)
    bare = replace(
        plan,
        buffers=tuple(replace(each, source=None) if each.kind is Kind.WEIGHT else each for each in plan.buffers),
    )

    assert all(need.source.tensor == need.name for need in contract([bare]))
