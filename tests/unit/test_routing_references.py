"""References of the experts' small kernels against independent expressions: plain Python, tables, other torch ops."""

import dataclasses
from fractions import Fraction

import pytest

torch = pytest.importorskip("torch")

from jitspark.checking.arguments import allocate, draw_arguments, reference_function  # noqa: E402
from jitspark.errors import SpecError  # noqa: E402
from jitspark.registry import load_spec  # noqa: E402
from kernel_specs.sigmoid_bias_topk_routing import reference as routing  # noqa: E402

CPU = torch.device("cpu")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def called(specialization, case, seed, **changes):
    """Every argument by name after the reference ran on fresh ones, some of them changed."""
    draw = dict(draw_arguments(specialization, case.axes, torch.Generator().manual_seed(seed))) | changes
    arguments = allocate(specialization, case.axes, draw, CPU)
    arguments.fill(draw)
    reference_function(specialization)(*arguments.values(), **specialization.statics)
    return dict(zip([arg.name for arg in specialization.args], arguments.values(), strict=True))


def cases(name, most=10**9):
    spec = load_spec(name)
    chosen = [case for case in spec.cases if case.axes.get("num_tokens", 0) <= most]
    return [pytest.param(spec.specialize_case(case), case, id=f"{name}-{i}") for i, case in enumerate(chosen)]


@pytest.mark.parametrize(("specialization", "case"), cases("sigmoid_bias_topk_routing"))
def test_routing_is_a_sort_by_score_and_expert(specialization, case):
    got = called(specialization, case, seed=1)
    k = case.axes["num_experts_per_tok"]
    scores = torch.sigmoid(got["logits"].double().clamp(min=-87.0)).float()
    padding = got["is_padding"].tolist() if specialization.statics["padded"] else [0] * case.axes["num_tokens"]

    for token, choices in enumerate((scores + got["bias"]).tolist()):
        ids = sorted(range(len(choices)), key=lambda expert: (-choices[expert], expert))[:k]
        chosen = [scores[token, expert].item() for expert in ids]
        weights = [score / (sum(chosen) + 1e-15) for score in chosen]
        assert got["topk_ids"][token].tolist() == ([-1] * k if padding[token] else ids)
        wanted = torch.tensor([0.0] * k if padding[token] else weights)
        torch.testing.assert_close(got["topk_weights"][token], wanted, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize(("specialization", "case"), cases("sigmoid_bias_topk_routing"))
def test_schedule_lists_each_experts_routes(specialization, case):
    got = called(specialization, case, seed=2)
    lists: dict[int, list[int]] = {}
    for route, expert in enumerate(got["topk_ids"].flatten().tolist()):
        if expert >= 0:
            lists.setdefault(expert, []).append(route)
    experts = sorted(lists)
    ordered = [route for expert in experts for route in lists[expert]]
    ends = [sum(len(lists[expert]) for expert in experts[:i]) for i in range(len(experts) + 1)]
    num_experts, num_routes = case.axes["num_experts"], got["routes"].numel()

    assert got["num_distinct_experts"].tolist() == [len(experts)]
    assert got["expert_ids"].tolist() == experts + [-1] * (num_experts - len(experts))
    assert got["route_offsets"].tolist() == ends + [len(ordered)] * (num_experts - len(experts))
    assert got["routes"].flatten().tolist() == ordered + [-1] * (num_routes - len(ordered))


def test_random_routing_reaches_its_corners():
    spec = load_spec("sigmoid_bias_topk_routing")
    case = next(case for case in spec.cases if case.axes["num_tokens"] == 64 and case.statics["padded"])
    seen = set()
    for seed in range(3):
        got = called(spec.specialize_case(case), case, seed)
        scores = torch.sigmoid(got["logits"].double()).float()
        choices = (scores + got["bias"]).sort(dim=-1, descending=True).values
        seen |= {"tie"} if (choices[:, 7] == choices[:, 8]).any() else set()
        seen |= {"saturated"} if (scores == 1).all(dim=-1).any() else set()
        seen |= {"vanishing"} if (scores < 1e-30).all(dim=-1).any() else set()
        seen |= {"padding"} if (got["topk_ids"] < 0).any() else set()
        seen |= {"shared"} if got["route_offsets"].diff().max() > 8 else set()

    assert seen == {"tie", "saturated", "vanishing", "padding", "shared"}


def test_choices_that_rounding_could_decide_are_redrawn():
    bias = torch.zeros(4)
    clear = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    tied = torch.tensor([[3.0, 2.0, 2.0, 0.0]])
    close = torch.tensor([[3.0, 2.0, 2.0 + 1e-6, 0.0]])
    far_behind = torch.tensor([[3.0, 2.0, 0.0, 1e-6]])
    behind_a_tie = torch.tensor([[30.0, 30.0, 16.5, 0.0]])

    unclear = [bool(routing._unclear(each, bias, 2)) for each in (clear, tied, close, far_behind, behind_a_tie)]

    assert unclear == [False, False, True, False, True]


@pytest.mark.parametrize(("specialization", "case"), cases("expert_combine_rmsnorm"))
def test_combine_norms_each_row_and_adds_them_up(specialization, case):
    got = called(specialization, case, seed=3)
    width = case.axes["moe_hidden_size"]
    rows = torch.stack(tuple(got["rows"].double())).sum(0)
    for token in range(case.axes["num_tokens"]):
        total = torch.zeros(width, dtype=torch.float64)
        for slot, expert in enumerate(got["topk_ids"][token].tolist()):
            if expert >= 0:
                scaled = rows[token, slot] * (1.0 + got["weight"].double())
                normed = torch.nn.functional.rms_norm(scaled, (width,), eps=got["eps"])
                total += got["topk_weights"][token, slot].double() * normed
        torch.testing.assert_close(got["out"][token].double(), total, rtol=2**-8 * (1 + 1e-6), atol=1e-38)


def test_random_rows_of_absent_experts_are_nan_and_some_tokens_have_none():
    spec = load_spec("expert_combine_rmsnorm")
    got = called(spec.specialize_case(spec.cases[-1]), spec.cases[-1], seed=4)
    absent = got["topk_ids"] < 0

    assert got["rows"].isnan().all(dim=-1).any(dim=0).equal(absent)
    assert absent.all(dim=-1).any() and not absent.all()
    assert (got["out"][absent.all(dim=-1)] == 0).all()


@pytest.mark.parametrize(("specialization", "case"), cases("logits_softcap")[2:])
def test_softcap_is_a_tanh(specialization, case):
    got = called(specialization, case, seed=5)
    exponential = torch.expm1((2 * got["logits"].double() * got["multiplier"] / got["cap"]).clamp(-700, 700))

    torch.testing.assert_close(got["out"].double(), got["cap"] * exponential / (exponential + 2), rtol=1e-7, atol=1e-44)
    assert got["out"].abs().max() == got["cap"]


@pytest.mark.parametrize(("specialization", "case"), cases("rmsnorm_nvfp4_quantize", most=8))
def test_nvfp4_bytes_are_nearest_table_entries(specialization, case):
    """In exact arithmetic: E4M3 and E2M1 as tables, to nearest, ties to the entry of even code."""
    got = called(specialization, case, seed=6)
    width = case.axes["hidden_size"]
    normed = torch.nn.functional.rms_norm(got["x"].double(), (width,), got["weight"].double() + 1.0, got["eps"])
    blocks = normed.bfloat16().float().view(-1, 16)
    g = got["global_scale"]
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()
    nibbles = torch.stack((got["codes"] & 15, got["codes"] >> 4), dim=-1).view(-1, 16)

    for block, codes, scale in list(zip(blocks, nibbles, got["scales"].flatten(), strict=True))[::7]:
        wanted = g * (block.abs().max() * torch.tensor(1 / 6, dtype=torch.float32))
        assert scale.item() == nearest(wanted.item(), e4m3)
        dequantized = torch.tensor(e4m3[scale])
        factor = 1.0 / (dequantized * (1.0 / g)) if e4m3[scale] else torch.zeros(1)
        for value, code in zip((block * factor).tolist(), codes.tolist(), strict=True):
            assert code & 7 == nearest(abs(value), E2M1)
            assert code >> 3 == (str(value)[0] == "-")


def nearest(value, table):
    """The index of the entry next to `value`, of two the even one; the last for all beyond."""
    distances = [(abs(Fraction(entry) - Fraction(value)), index % 2, index) for index, entry in enumerate(table)]
    return min(distances)[2]


def test_random_norms_reach_ties_saturation_and_vanishing_scales():
    spec = load_spec("rmsnorm_nvfp4_quantize")
    case = next(case for case in spec.cases if case.axes["num_tokens"] == 64 and case.axes["hidden_size"] == 256)
    seen = set()
    for seed, g in enumerate((2.0**-8, 512.0)):
        got = called(spec.specialize_case(case), case, seed, global_scale=torch.tensor([g]))
        scales = got["scales"].view(torch.float8_e4m3fn).float()
        seen |= {"saturated scale"} if (scales == 448).any() else set()
        seen |= {"vanishing scale"} if ((scales == 0) & (got["x"].view(64, -1, 16) != 0).any(dim=-1)).any() else set()
        normed = torch.nn.functional.rms_norm(
            got["x"].double(), (case.axes["hidden_size"],), got["weight"].double() + 1.0, got["eps"]
        ).bfloat16()
        quotients = (normed.view(64, -1, 16).double() / (scales[..., None].double() / g)).abs()
        seen |= {f"tie at {tie}" for tie in (0.75, 2.5, 5.0) if (quotients == tie).any()}

    assert seen == {"saturated scale", "vanishing scale", "tie at 0.75", "tie at 2.5", "tie at 5.0"}


@pytest.mark.parametrize(("specialization", "case"), cases("router_gemm", most=8))
def test_router_logits_are_sums_of_products(specialization, case):
    got = called(specialization, case, seed=7)
    wanted = torch.einsum("th,eh->te", got["activation"].double(), got["weight"].double())

    torch.testing.assert_close(got["logits"].double(), wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(("specialization", "case"), cases("router_pooler_gemm", most=8))
def test_router_and_pooler_in_one_launch_are_sums_of_products(specialization, case):
    got = called(specialization, case, seed=9)
    rows = got["activation"].double()
    logits, pooled = (torch.einsum("th,nh->tn", rows, got[name].double()) for name in ("router", "pooler"))

    torch.testing.assert_close(got["logits"].double(), logits, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(got["pooled"], pooled.bfloat16(), rtol=2**-7, atol=0)


def test_three_bf16_parts_hold_an_fp32_weight_exactly():
    """What the kernel's `split_pair` rests on, with its cuts: 16 bits off, what is left, and so on."""
    sizes = 2.0 ** torch.arange(-80, 120).repeat(500)
    weight = torch.randn(len(sizes), generator=torch.Generator().manual_seed(8)) * sizes
    left, parts = weight, []
    for _ in range(3):
        top = (left.view(torch.int32) & -65536).view(torch.float32)
        parts.append(top)
        left = left - top

    assert all(part.bfloat16().float().equal(part) for part in parts)
    assert (left == 0).all()
    assert sum(part.double() for part in parts).equal(weight.double())
    assert not (parts[0] + parts[1]).equal(weight)


@pytest.mark.parametrize("name", ["sigmoid_bias_topk_routing", "expert_combine_rmsnorm", "router_gemm"])
def test_sizes_that_the_kernels_do_not_serve_are_refused(name):
    spec = load_spec(name)
    case = spec.cases[0]
    too_many = dataclasses.replace(case, axes={**case.axes, "num_tokens": 65, "num_experts_per_tok": 9})
    served = {axis: size for axis, size in too_many.axes.items() if axis in case.axes}

    with pytest.raises(SpecError, match=r"is more than|is none of"):
        spec.specialize_case(dataclasses.replace(case, axes=served))
