"""References of the BF16 experts' products against loops over routes, and what their random schedules reach."""

import pytest

torch = pytest.importorskip("torch")

from grouped_gemm_calls import called, expert_of_route  # noqa: E402

from jitspark.checking.arguments import reference_function  # noqa: E402
from jitspark.checking.check import check_case  # noqa: E402
from jitspark.registry import load_spec  # noqa: E402
from kernel_specs.bf16_grouped_gemm_swiglu import schedules  # noqa: E402
from kernel_specs.primitives.grouped_tiling import GroupedTiling  # noqa: E402

SWIGLU, PARTIAL = "bf16_grouped_gemm_swiglu", "bf16_grouped_gemm_partial"
MOST_WEIGHTS = 2**22


def cases(name):
    """Those that a CPU multiplies in no time."""
    spec = load_spec(name)
    sizes = ("num_local_experts", "moe_hidden_size", "intermediate_width")
    for i, case in enumerate(spec.cases):
        if torch.tensor([case.axes[size] for size in sizes]).prod() <= MOST_WEIGHTS:
            yield pytest.param(spec.specialize_case(case), case, id=f"{name}-{i}")


@pytest.mark.parametrize(("specialization", "case"), list(cases(SWIGLU)))
def test_swiglu_is_two_linear_layers_per_route(specialization, case):
    draw, got = called(specialization, case, seed=1)
    k = case.axes["num_experts_per_tok"]
    for route, expert in enumerate(expert_of_route(got)):
        token, slot = divmod(route, k)
        if expert is None:
            assert got["h"][token, slot].equal(draw["h"][token, slot])
            continue
        w1, w3 = got["weight"][expert].double().split(case.axes["intermediate_width"])
        row = got["activation"][token].double()
        wanted = torch.nn.functional.silu(torch.nn.functional.linear(row, w1)) * torch.mv(w3, row)
        torch.testing.assert_close(got["h"][token, slot].double(), wanted, rtol=2**-8 * (1 + 1e-6), atol=1e-38)


@pytest.mark.parametrize(("specialization", "case"), list(cases(PARTIAL)))
def test_partial_rows_are_a_linear_layer_per_route(specialization, case):
    draw, got = called(specialization, case, seed=2)
    ulp = 2**-8 if specialization.dtypes["rows_dtype"] == "bfloat16" else 2**-24
    for route, expert in enumerate(expert_of_route(got)):
        at = divmod(route, case.axes["num_experts_per_tok"])
        if expert is None:
            assert got["rows"][at].equal(draw["rows"][at])
            continue
        wanted = torch.mv(got["weight"][expert].double(), got["h"][at].double())
        torch.testing.assert_close(got["rows"][at].double(), wanted, rtol=ulp * (1 + 1e-6), atol=1e-38)


@pytest.mark.parametrize(("specialization", "case"), [*cases(SWIGLU), *cases(PARTIAL)])
def test_nothing_but_what_is_used_is_finite(specialization, case):
    _, got = called(specialization, case, seed=3)
    experts = expert_of_route(got)
    used = {expert for expert in experts if expert is not None}

    for expert, weight in enumerate(got["weight"]):
        assert bool(weight.isfinite().all() if expert in used else weight.isnan().all())
    if "activation" in got:
        tokens = {
            route // case.axes["num_experts_per_tok"] for route, expert in enumerate(experts) if expert is not None
        }
        assert {i for i, row in enumerate(got["activation"]) if row.isfinite().all()} == tokens
        assert got["h"].isfinite().all()
    else:
        finite = got["h"].flatten(0, 1).isfinite().all(dim=-1).tolist()
        assert finite == [expert is not None for expert in experts]
        assert got["rows"].isfinite().all()


@pytest.mark.parametrize("name", [SWIGLU, PARTIAL])
def test_random_schedules_reach_their_corners(name):
    spec = load_spec(name)
    seen = set()
    for case in spec.cases:
        for seed in range(8):
            schedule = schedules.draw(case.axes, torch.Generator().manual_seed(seed))
            rows = schedule.route_offsets.diff()
            here = schedules.local_routes(schedule, case.axes["num_local_experts"]).numel()
            distinct = int((rows > 0).sum())
            seen |= {"one expert has all rows"} if distinct == 1 and rows.max() == 64 else set()
            seen |= {"each route its own"} if distinct == rows.sum() == 64 else set()
            seen |= {"none here"} if here == 0 else set()
            seen |= {"some here"} if 0 < here < rows.sum() else set()
            seen |= {"missing routes"} if rows.sum() < schedule.routes.numel() else set()
            seen |= {"uneven"} if distinct > 1 and rows[rows > 0].min() == 1 and rows.max() > 16 else set()
            seen |= {"more than eight"} if case.axes["num_tokens"] <= 16 and rows.max() > 8 else set()

    wanted = "one expert has all rows,each route its own,none here,some here,missing routes,uneven,more than eight"
    assert seen == set(wanted.split(","))


@pytest.mark.parametrize("name", [SWIGLU, PARTIAL])
def test_a_row_that_is_not_ones_own_is_caught(name):
    """The rows of routes that are elsewhere must stay, and those that are here must be written."""
    spec = load_spec(name)
    out = "h" if name == SWIGLU else "rows"
    case = next(case for case in spec.cases if case.axes["num_local_experts"] == 4 and case.axes["num_tokens"] == 64)
    specialization = spec.specialize_case(case)
    names = [arg.name for arg in specialization.args]

    def kernel(*values, change):
        given = dict(zip(names, values, strict=True))
        before = given[out].clone()
        reference_function(specialization)(*values, **specialization.statics)
        written = (given[out] != before).any(dim=-1)
        if change == "write all":
            given[out][~written] = 1.0
        if change == "write nothing":
            given[out].copy_(before)

    def problems(change):
        generator = torch.Generator().manual_seed(5)
        return check_case(specialization, case, lambda *values: kernel(*values, change=change), generator).problems

    assert problems("none") == ()
    assert any("must stay" in text for text in problems("write all"))
    assert any("beyond bounds" in text for text in problems("write nothing"))


@pytest.mark.parametrize("name", [SWIGLU, PARTIAL])
def test_two_ctas_fit_on_a_multiprocessor_and_the_ring_is_deep(name):
    for case in load_spec(name).cases:
        width, inner = case.axes["moe_hidden_size"], case.axes["intermediate_width"]
        parts, sizes = (2, (width, inner)) if name == SWIGLU else (1, (inner, width))
        tile = GroupedTiling(in_features=sizes[0], out_features=sizes[1], parts=parts, **case.statics)

        assert 2 * (tile.shared_bytes + 1024) <= 228 * 1024
        assert tile.stages * tile.weight_stage >= 64 * 1024
