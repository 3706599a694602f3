"""Parts of a step as the benchmark builds them: references in place of kernels pass, and what is wrong is not timed."""

from functools import partial

import pytest

torch = pytest.importorskip("torch")

from bench import scene, scenes_attention, scenes_dense, scenes_experts  # noqa: E402
from bench.scenes import BUILD  # noqa: E402
from bench.step_parts import step_parts  # noqa: E402
from jitspark.checking.arguments import reference_function  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.registry import load_spec  # noqa: E402

TARGET = "sm_90a"


@pytest.fixture(autouse=True)
def little_to_rotate(monkeypatch):
    for module in (scenes_attention, scenes_dense):
        monkeypatch.setattr(module, "rotation_bytes", lambda: 1)


def reference(name, axes, statics, dtypes=None):
    """The reference of a kernel as a stand-in for it, and its launch."""
    spec = load_spec(name)
    made = spec.specialize(axes=axes, statics=statics, dtypes=dtypes or {})
    launch = {"kernel": name, "axes": axes, "statics": statics, "dtypes": dtypes or {}}
    return partial(reference_function(made), **made.statics), launch


def built(kind, launches, kernels, tokens, sizes):
    part = {"kind": kind, "part": kind, "tp": 8, "num_tokens": tokens, "launches": launches, "sizes": sizes}
    return BUILD[kind](part, kernels, torch.Generator().manual_seed(1))


def nvfp4_scene(factor=1.0):
    from kernel_specs.nvfp4_grouped_gemm_partial.spec import const_axes as second_axes
    from kernel_specs.nvfp4_grouped_gemm_partial.spec import split
    from kernel_specs.nvfp4_grouped_gemm_swiglu.spec import const_axes, statics

    hidden, width = 256, 128
    first, first_launch = reference("nvfp4_grouped_gemm_swiglu", const_axes(hidden, width, 8), statics(hidden))
    second, second_launch = reference(
        "nvfp4_grouped_gemm_partial",
        second_axes(hidden, width, 8),
        split(width, hidden),
        {"rows_dtype": "float32"},
    )

    def scaled(*arguments):
        second(*arguments)
        arguments[8].mul_(factor)

    return built(
        "nvfp4_experts",
        {"first": first_launch, "second": second_launch},
        {"first": first, "second": scaled},
        4,
        {"distinct": 12, "num_experts": 32},
    )


def test_quantized_experts_are_held_to_unquantized_ones():
    assert dict(nvfp4_scene().wrong) == {}
    assert scene.OURS in nvfp4_scene(factor=1.3).wrong


def test_experts_of_different_sets_share_no_weights():
    made = nvfp4_scene()
    assert len(made.calls[scene.OURS]) == 2


@pytest.mark.parametrize(("count", "tokens"), [(8, 8), (24, 8), (57, 8), (64, 8), (102, 16)])
def test_routes_reach_every_expert_of_a_set_and_a_token_has_eight_different_ones(count, tokens):
    generator = torch.Generator().manual_seed(2)
    ids = scenes_experts.spread(torch.arange(100, 100 + count), tokens, generator)

    assert sorted(ids.unique().tolist()) == list(range(100, 100 + count))
    assert all(len(row.unique()) == 8 for row in ids)


def test_attention_goes_over_blocks_of_its_own():
    axes = {"query_length": 8, "num_heads": 16, "num_kv_heads": 2, "qkvg_size": 2304}
    statics = {"sliding_window": 64, "tile_blocks": 4, "stages": 6, "warp_tiles": 1, "key_groups": 1}
    attention, launch = reference("paged_gqa_verify_attention", axes, statics)
    combine, combine_launch = reference(
        "splitkv_combine_rmsnorm_sigmoid_gate",
        {"num_heads": 16, "num_kv_heads": 2, "qkvg_size": 2304, "attention_size": 1024},
        {"threads": 128},
    )
    made = built(
        "attention",
        {"attention": launch, "combine": combine_launch},
        {"attention": attention, "combine": combine},
        8,
        {"context": 256, "num_requests": 1, "num_splits": 2},
    )

    made.calls[scene.OURS][0]()
    assert len(made.calls[scene.OURS]) == 2
    assert made.moved_bytes == (64 + 7) * 2 * 2 * 64 * 2 + 3 * 8 * 16 * 64 * 2


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.01, False)])
def test_the_router_and_the_pooler_are_held_to_float64(factor, right):
    router, launch = reference("router_gemm", {"num_experts": 16, "hidden_size": 512}, {"max_tokens": 8, "split": 2})
    pooler_axes = {"weight_rows": 64, "out_features": 64, "in_features": 512}

    def product(activation, weight, out):
        out.copy_(factor * (activation.double() @ weight.double().t()))

    made = built(
        "router", {"router": launch, "pooler": {"axes": pooler_axes}}, {"router": router, "pooler": product}, 8, {}
    )
    assert (scene.OURS not in made.wrong) == right
    assert any("fp32_router_gemm" in each for each in made.absent)


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.01, False)])
def test_the_router_and_the_pooler_in_one_launch_are_held_to_float64(factor, right):
    from kernel_specs.router_pooler_gemm.spec import statics

    axes = {"num_experts": 16, "hidden_size": 512, "pooled_width": 64}
    exact, launch = reference("router_pooler_gemm", axes, statics(512, 64, 8))

    def products(activation, router, pooler, logits, pooled):
        exact(activation, router, pooler, logits, pooled)
        pooled.mul_(factor)

    made = built("router", {"router_pooler": launch}, {"router_pooler": products}, 8, {})
    assert (scene.OURS not in made.wrong) == right


@pytest.mark.parametrize("tp", [4, 8, 16])
def test_every_part_of_every_token_count_names_launches_that_exist(tp):
    found = list(step_parts("muse_spark_open", deployment("muse_spark_open", tp), TARGET, (8, 16, 32, 64)))

    assert {part["kind"] for part in found} == set(BUILD)
    assert len({(part["part"], part["num_tokens"]) for part in found}) == len(found)
    aims = {part["part"] for part in found if part["aim_us"] or part["aim_ratio"]}
    assert bool(aims) == (tp == 8)
