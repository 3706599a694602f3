"""The draft's plans: each is sound, complete, and reads every weight and cache that the draft has."""

import pytest

from jitspark.errors import SpecError
from jitspark.geometry import deployment, geometry_names, load_geometry
from jitspark.plans.builder import Keys
from jitspark.plans.checks import PlanChecker
from jitspark.plans.draft import combine_plan, context_plan, draft_plan, uses_rope
from jitspark.plans.plan import Kind, Stage
from jitspark.registry import specializations

TARGET = "sm_90a"
KEYS = Keys(TARGET)
DEPLOYMENTS = [(name, tp) for name in geometry_names() for tp in load_geometry(name).tp_sizes]
EACH = pytest.mark.parametrize(("name", "tp"), DEPLOYMENTS)


def draft_plans(name, tp, **options):
    asked = deployment(name, tp)
    forward = [draft_plan(asked, rows, TARGET, keys=KEYS, **options) for rows in asked.draft_query_rows]
    context = [context_plan(asked, rows, TARGET, keys=KEYS, **options) for rows in asked.draft_context_rows]
    from_taps = [
        context_plan(asked, rows, TARGET, keys=KEYS, from_taps=True, **options) for rows in asked.draft_context_rows
    ]
    combine = [combine_plan(asked, rows, TARGET, keys=KEYS) for rows in asked.draft_context_rows]
    return [*forward, *context, *from_taps, *combine]


def names(plan, kind):
    return [buffer.name for buffer in plan.buffers if buffer.kind is kind]


@EACH
def test_every_plan_agrees_with_itself(name, tp):
    checker = PlanChecker()
    for plan in draft_plans(name, tp):
        checker.require(plan, f"{plan.stage} {plan.rows}", None)


@EACH
def test_the_deployment_asks_for_every_kernel_that_its_plans_launch(name, tp):
    asked = {KEYS.of(each) for each in specializations(deployment(name, tp))}

    for mode in deployment(name, tp).draft.attention.position_modes:
        for plan in draft_plans(name, tp, rope=mode == "rope"):
            assert set(plan.keys()) <= asked, (plan.stage, plan.rows)


@EACH
def test_a_forward_reads_every_layer_s_weights_and_cache(name, tp):
    asked = deployment(name, tp)
    plan = draft_plan(asked, 7, TARGET, keys=KEYS)
    layers = range(asked.draft.num_hidden_layers)
    each = (
        *("pre_qkv_norm", "qkv_gate", "o_proj", "attn_alpha", "attn_beta", "pre_ffn_norm", "gate_up", "down"),
        *("ffn_alpha", "ffn_beta", "post_ffn_norm"),
    )
    wanted = {f"layers.{layer}.{weight}" for layer in layers for weight in each} | {"final_norm"}
    wanted |= {"rope.cos_sin"} if uses_rope(asked.draft) else set()

    assert set(names(plan, Kind.WEIGHT)) == wanted
    assert names(plan, Kind.KV_CACHE) == [f"layers.{layer}.kv_cache" for layer in layers]
    assert names(plan, Kind.OUTPUT) == ["hidden"]
    assert (plan.stage, plan.query_length, plan.rows) == (Stage.DRAFT, 7, 7)


@EACH
def test_the_context_chain_is_three_launches_for_all_layers(name, tp):
    asked = deployment(name, tp)
    layers = range(asked.draft.num_hidden_layers)
    plan = context_plan(asked, 16, TARGET, keys=KEYS)
    from_taps = context_plan(asked, 16, TARGET, from_taps=True, keys=KEYS)

    assert [launch.name for launch in plan.launches] == ["context.norms", "context.kv", "context.append"]
    assert {f"layers.{layer}.slot_mapping" for layer in layers} < set(names(plan, Kind.INPUT))
    assert names(plan, Kind.KV_CACHE) == [f"layers.{layer}.kv_cache" for layer in layers]
    combined = [launch.name for launch in from_taps.launches][: -len(plan.launches)]
    assert combined == (["fc"] if tp == 1 else ["fc", "fc.gather"])
    assert [launch.name for launch in combine_plan(asked, 16, TARGET, keys=KEYS).launches] == combined
    assert "taps" in names(from_taps, Kind.INPUT) and "context" not in names(from_taps, Kind.INPUT)


@EACH
def test_branches_are_summed_over_the_ranks_where_there_are_several(name, tp):
    plan = draft_plan(deployment(name, tp), 7, TARGET, keys=KEYS)
    boundaries = {launch.operation for launch in plan.launches if ".post_" in launch.name}

    assert boundaries == {"gated_residual_rmsnorm" if tp == 1 else "allreduce_gated_residual_rmsnorm"}
    assert (plan.symmetric_bytes > 0) == (tp > 1)


def test_without_rope_no_table_is_read():
    for plan in draft_plans("muse_spark_open", 8, rope=False):
        assert "rope.cos_sin" not in names(plan, Kind.WEIGHT)
        assert all("cos_sin" not in argument.buffer for launch in plan.launches for argument in launch.tensors())


def test_rows_that_are_no_whole_requests_are_refused():
    with pytest.raises(SpecError, match="num_tokens=8 is not divisible by query_length = 7"):
        draft_plan(deployment("tiny", 1), 8, TARGET, keys=KEYS)
