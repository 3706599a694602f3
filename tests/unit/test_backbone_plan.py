"""The backbone's plans: the model's schedule launch by launch, arguments as the specs order them, one key for each."""

from collections import Counter

import pytest
from msgspec.structs import replace

from jitspark.errors import SpecError
from jitspark.geometry import deployment
from jitspark.key import recipe_of
from jitspark.plans.backbone import decode_plan, logits_plan
from jitspark.plans.builder import Keys
from jitspark.plans.plan import CUTE, Kind, ScalarArgument, Stage, TensorArgument
from jitspark.registry import load_spec, specializations
from kernel_specs.allgather_rmsnorm_nvfp4_quantize_routing import spec as expert_input
from kernel_specs.paged_gqa_verify_attention.spec import num_splits

TARGET = "sm_90a"
KEYS = Keys(TARGET)
EXPERT_INPUT = "allgather_rmsnorm_nvfp4_quantize_routing"
DEPLOYMENTS = [("tiny", 1), ("tiny", 2), ("tiny_swa", 1), ("tiny_swa", 2), ("muse_spark_open", 8)]


def of(plan, operation):
    return [launch for launch in plan.launches if launch.operation == operation]


def layers(launches):
    return [int(launch.name.split(".")[1]) for launch in launches]


def named(plan, name):
    return next(launch for launch in plan.launches if launch.name == name)


def buffer_of(launch, argument):
    """The buffer in the place of a spec's argument."""
    names = [arg.name for arg in load_spec(launch.operation).args if arg.when is None or _exists(launch, arg)]
    return launch.arguments[names.index(argument)].buffer


def _exists(launch, arg):
    return launch.statics[arg.when[0]] == arg.when[1]


@pytest.fixture(scope="module")
def plan():
    return decode_plan(deployment("muse_spark_open", 8), 8, TARGET, keys=KEYS)


@pytest.mark.parametrize(("geometry", "tp"), DEPLOYMENTS)
def test_every_launch_passes_the_spec_s_arguments_in_the_spec_s_order(geometry, tp):
    made = decode_plan(deployment(geometry, tp), 16, TARGET, keys=KEYS)
    buffers = made.buffer_named()
    for launch in (each for each in made.launches if each.provider == CUTE):
        spec = load_spec(launch.operation)
        args = [arg for arg in spec.args if arg.when is None or _exists(launch, arg)]
        assert len(args) == len(launch.arguments), launch.name
        for arg, given in zip(args, launch.arguments, strict=True):
            if isinstance(given, ScalarArgument):
                assert given.dtype == arg.dtype, launch.name
                continue
            shape = given.shape or buffers[given.buffer].shape
            assert len(shape) == len(arg.axes), (launch.name, arg.name)
            assert given.role == ("part" if arg.name in spec.partial_outputs else arg.role)
            assert given.early is (arg.name in (*spec.early_reads, *spec.early_writes))
        assert launch.triggers_early is spec.triggers_early


@pytest.mark.parametrize(("geometry", "tp"), DEPLOYMENTS)
def test_its_keys_are_among_those_that_warm_makes(geometry, tp):
    served = deployment(geometry, tp)
    warmed = {recipe_of(each, TARGET).key for each in specializations(served)}
    for rows in served.backbone_rows:
        assert set(decode_plan(served, rows, TARGET, keys=KEYS).keys()) <= warmed
    for rows in (1, 7, 33, 64):
        assert set(logits_plan(served, rows, TARGET, keys=KEYS).keys()) <= warmed


def test_attention_follows_the_schedule(plan):
    backbone = deployment("muse_spark_open", 8).backbone
    full = {layer for layer in range(62) if (61 - layer) % 4 == 0}
    attention = of(plan, "paged_gqa_verify_attention")
    append = of(plan, "qk_rmsnorm_rope_paged_kv_append")

    assert layers(attention) == layers(append) == list(range(62))
    windows = {layer: launch.statics["sliding_window"] for layer, launch in enumerate(attention)}
    assert windows == {layer: 0 if layer in full else 2048 for layer in range(62)}
    assert [launch.statics["rope"] for launch in append] == [layer not in full for layer in range(62)]
    for layer, launch in enumerate(attention):
        assert buffer_of(launch, "kv_cache") == f"layers.{layer}.kv_cache"
        assert buffer_of(launch, "block_table") == f"layers.{layer}.block_table"
    scales = {launch.arguments[-1].value for launch in attention}
    assert scales == {backbone.qk_scale_factor / 8}


def test_one_rope_table_serves_all_layers(plan):
    tables = {
        buffer_of(each, "cos_sin") for each in of(plan, "qk_rmsnorm_rope_paged_kv_append") if each.statics["rope"]
    }

    assert tables == {"rope.cos_sin"}
    assert [each.name for each in plan.buffers if each.shape[-1:] == (64,) and each.kind is Kind.WEIGHT] == [
        "rope.cos_sin"
    ]


def test_layers_0_and_61_have_bf16_experts_and_the_others_nvfp4(plan):
    assert layers(of(plan, "bf16_grouped_gemm_swiglu")) == layers(of(plan, "bf16_grouped_gemm_partial")) == [0, 61]
    for operation in (EXPERT_INPUT, "nvfp4_grouped_gemm_swiglu", "nvfp4_grouped_gemm_partial"):
        assert layers(of(plan, operation)) == list(range(1, 61))
    tiny = decode_plan(deployment("tiny", 1), 8, TARGET, keys=KEYS)
    assert layers(of(tiny, "bf16_grouped_gemm_swiglu")) == [0, 1, 2, 3]
    assert not of(tiny, "rmsnorm_nvfp4_quantize")


def test_taps_leave_behind_their_layers_and_the_last_boundary_is_the_final_norm(plan):
    boundaries = of(plan, "allgather_gated_residual_rmsnorm")
    tapped = [launch for launch in boundaries if launch.statics["write_tap"]]

    assert layers(boundaries) == list(range(62))
    assert {layer: buffer_of(tapped[i], "tap") for i, layer in enumerate(layers(tapped))} == {
        layer: f"taps.{layer}" for layer in (13, 29, 45, 57, 61)
    }
    last = boundaries[-1]
    assert (buffer_of(last, "weight"), buffer_of(last, "activation")) == ("final_norm", "hidden")
    assert last.statics["gain_center"] == 0.0
    assert all(each.statics["gain_center"] == 1.0 for each in boundaries[:-1])
    assert [buffer_of(each, "weight") for each in boundaries[:2]] == ["layers.1.pre_qkv_norm", "layers.2.pre_qkv_norm"]
    outputs = [each.name for each in plan.buffers if each.kind is Kind.OUTPUT]
    assert outputs == [*(f"taps.{layer}" for layer in (13, 29, 45, 57, 61)), "hidden"]


def test_post_norms_have_their_epsilon_and_pre_norms_theirs(plan):
    for launch in (*of(plan, "allreduce_gated_residual_rmsnorm"), *of(plan, "allgather_gated_residual_rmsnorm")):
        assert [each.value for each in launch.arguments[-2:]] == [1e-8, 1e-5], launch.name
    assert {launch.arguments[-1].value for launch in of(plan, "expert_reduce_rmsnorm_combine")} == {1e-8}
    assert {launch.arguments[-1].value for launch in of(plan, EXPERT_INPUT)} == {1e-5}


def test_nvfp4_experts_have_their_input_and_their_schedule_from_one_launch(plan):
    routed = layers(of(plan, EXPERT_INPUT))

    assert routed == list(range(1, 61))
    assert layers(of(plan, "sigmoid_bias_topk_routing")) == [0, 61]
    assert layers([each for each in of(plan, "allgather_columns") if "pooler" in each.name]) == [0, 61]
    assert not of(plan, "rmsnorm_nvfp4_quantize")
    assert len(plan.launches) == 812
    gate_up = of(plan, "nvfp4_grouped_gemm_swiglu")[0]
    written = {each.buffer for each in of(plan, EXPERT_INPUT)[0].tensors() if each.role == "out" and each.early}
    read = {each.buffer for each in gate_up.tensors() if each.early}
    assert written == {"expert_ids", "route_offsets", "routes"} <= read


@pytest.mark.parametrize(("columns", "one"), [(2048, True), (3072, False), (4096, True), (6144, False), (8192, True)])
def test_rows_that_threads_do_not_share_evenly_are_gathered_and_routed_in_launches_of_their_own(columns, one):
    experts = replace(deployment("muse_spark_open", 8).backbone.experts, moe_hidden_size=columns)

    assert expert_input.serves(experts) is one


@pytest.mark.parametrize(("rows", "providers"), [(8, {}), (16, {}), (24, {}), (64, {}), (8, {"router": "stock"})])
def test_router_and_pooler_are_one_launch_where_rows_are_few_and_both_are_ours(rows, providers):
    made = decode_plan(deployment("muse_spark_open", 8), rows, TARGET, keys=KEYS, providers=providers)
    poolers = [each for each in of(made, "skinny_gemm_bf16") if each.name.endswith(".pooler")]
    one = not providers and rows <= 16

    assert layers(of(made, "router_pooler_gemm")) == (list(range(62)) if one else [])
    assert layers(of(made, "router_gemm")) == layers(poolers) == ([] if one else list(range(62)))


@pytest.mark.parametrize("part", ["all_reduce", "experts", "router"])
def test_where_another_provider_has_one_of_its_parts_these_are_launches_of_their_own(part):
    made = decode_plan(deployment("muse_spark_open", 8), 8, TARGET, keys=KEYS, providers={part: "stock"})

    assert not of(made, EXPERT_INPUT)
    assert len(made.launches) == (994 if part == "router" else 932)
    for operation in ("sigmoid_bias_topk_routing", "allgather_columns"):
        assert layers(of(made, operation)) == list(range(62))
    assert layers(of(made, "rmsnorm_nvfp4_quantize")) == list(range(1, 61))


def test_a_rank_alone_has_no_exchange_and_ranks_have_four_in_a_layer():
    alone = decode_plan(deployment("tiny", 1), 8, TARGET, keys=KEYS)
    two = decode_plan(deployment("tiny", 2), 8, TARGET, keys=KEYS)
    exchanges = Counter(launch.operation for launch in two.launches if launch.part == "all_reduce")

    assert not [launch for launch in alone.launches if launch.part == "all_reduce"]
    assert alone.symmetric_bytes == 0
    assert exchanges == dict.fromkeys(
        (
            "allreduce_gated_residual_rmsnorm",
            "allgather_columns",
            "expert_reduce_rmsnorm_combine",
            "allgather_gated_residual_rmsnorm",
        ),
        4,
    )
    assert two.symmetric_bytes > 0
    peers = [each for each in two.buffers if each.kind is Kind.PEERS]
    assert len(peers) == 5 and all(each.shape == (2,) for each in peers)
    assert all(two.buffer_named()[each.of].kind is Kind.SYMMETRIC for each in peers)
    scalars = {each.value for launch in two.launches for each in launch.arguments if isinstance(each, ScalarArgument)}
    assert {"rank", "timeout_us"} <= scalars


def test_a_provider_takes_a_part_and_its_launches_have_no_key():
    made = decode_plan(deployment("tiny_swa", 1), 24, TARGET, keys=KEYS, providers={"attention": "stock"})
    theirs = [launch for launch in made.launches if launch.part == "attention"]

    assert len(theirs) == 3 * 4
    assert all(launch.provider == "stock" and launch.key is None and not launch.triggers_early for launch in theirs)
    assert not any(each.early for launch in theirs for each in launch.tensors())
    assert made.buffer_named()["full.partial_out"].shape[2] == 1
    ours = decode_plan(deployment("tiny_swa", 1), 24, TARGET, keys=KEYS)
    assert [launch.operation for launch in made.launches] == [launch.operation for launch in ours.launches]
    assert dict(made.providers) == {"attention": "stock"}


@pytest.mark.parametrize(
    ("requests", "heads", "window", "splits"),
    [
        (1, 2, 0, 64),
        (1, 2, 2048, 33),  # a tile each
        (1, 1, 0, 128),
        (1, 1, 2048, 33),
        (2, 2, 2048, 33),
        (3, 2, 2048, 17),  # 22 would leave two tiles each too
        (8, 2, 0, 8),
        (8, 4, 0, 4),
        (8, 2, 2048, 7),
        (8, 4, 2048, 4),
    ],
)
def test_splits_fill_the_multiprocessors_once(requests, heads, window, splits):
    assert num_splits(requests, heads, 8, window) == splits
    assert requests * heads * splits <= 132


def test_the_workspace_is_reused(plan):
    """All buffers side by side would take far more than what lives at one time."""
    own = [each for each in plan.buffers if each.kind is Kind.WORKSPACE]
    sizes = {"float32": 4, "bfloat16": 2, "int32": 4, "uint8": 1}
    total = 0
    for each in own:
        size = sizes[each.dtype]
        for length in each.shape:
            size *= length
        total += size

    assert plan.workspace_bytes < 0.6 * total


@pytest.mark.parametrize(("geometry", "tp", "rows"), [("tiny_swa", 1, 24), ("tiny", 2, 64), ("muse_spark_open", 16, 8)])
def test_what_is_read_was_overwritten_by_nobody(geometry, tp, rows):
    """The step played over its workspace, byte range by byte range: whoever wrote last is whose content is read."""
    made = decode_plan(deployment(geometry, tp), rows, TARGET, keys=KEYS)
    places = {each.name: _blocks(each) for each in made.buffers if each.kind is Kind.WORKSPACE}
    holder, read = {}, 0
    for launch in made.launches:
        own = [each for each in launch.tensors() if each.buffer in places]
        for argument in (each for each in own if each.role in ("in", "inout")):
            held = {holder.get(block) for block in places[argument.buffer]}
            assert held == {argument.buffer}, (launch.name, argument.buffer, held)
            read += 1
        for argument in (each for each in own if each.role != "in"):
            holder.update(dict.fromkeys(places[argument.buffer], argument.buffer))
    assert read > 6 * len(made.launches) / 5
    assert max(max(blocks) for blocks in places.values()) * 256 < made.workspace_bytes


def _blocks(buffer):
    """The 256-byte blocks that a buffer touches."""
    size = {"float32": 4, "bfloat16": 2, "int32": 4, "uint8": 1}[buffer.dtype]
    for length in buffer.shape:
        size *= length
    return range(buffer.offset // 256, -(-(buffer.offset + size) // 256))


def test_logits_are_gathered_and_capped():
    alone = logits_plan(deployment("muse_spark_open", 8), 5, TARGET, keys=KEYS)
    assert [launch.operation for launch in alone.launches] == [
        "skinny_gemm_bf16",
        "allgather_columns",
        "logits_softcap",
    ]
    assert alone.stage is Stage.LOGITS
    assert [each.value for each in alone.launches[-1].arguments[-2:]] == [0.1767766952966369, 20.0]
    assert alone.buffer_named()["logits"].shape == (5, 202048)
    one = logits_plan(deployment("tiny", 1), 64, TARGET, keys=KEYS)
    assert [launch.operation for launch in one.launches] == ["skinny_gemm_bf16", "logits_softcap"]


@pytest.mark.parametrize("rows", [0, 4, 12, 72])
def test_rows_that_no_step_has_are_refused(rows):
    with pytest.raises(SpecError, match=f"a decode step: found {rows} rows; needed 8 to 64 in steps of 8"):
        decode_plan(deployment("tiny", 1), rows, TARGET, keys=KEYS)


def test_more_logits_than_a_launch_multiplies_are_refused():
    with pytest.raises(SpecError, match="logits: found 65 rows; needed 1 to 64 in steps of 1"):
        logits_plan(deployment("tiny", 1), 65, TARGET, keys=KEYS)


def test_the_same_deployment_gives_the_same_plan_on_every_rank(plan):
    assert decode_plan(deployment("muse_spark_open", 8), 8, TARGET, keys=Keys(TARGET)) == plan
    arguments = [each for launch in plan.launches for each in launch.arguments if isinstance(each, TensorArgument)]
    assert len(arguments) > 5000
