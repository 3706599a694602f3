"""What bin/bench-decode-ranks arranges: whole experts, floors, equal bits, ranks that fail, and tables."""

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
msgspec = pytest.importorskip("msgspec")

from bench import (  # noqa: E402
    busiest_rank,
    decode,
    decode_rank,
    decode_ranks,
    decode_ranks_table,
    rank_starts,
    rank_timing,
)
from bench.decode_ranks_pack import served_at  # noqa: E402
from bench.expert_parallel import CLEAR, FIRST_EXPERT, first_expert, with_whole_experts  # noqa: E402
from bench.forced_routing import forced, forced_logits  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.backbone import decode_plan  # noqa: E402
from jitspark.plans.builder import Keys, nbytes  # noqa: E402
from jitspark.plans.plan import Kind, ScalarArgument  # noqa: E402

PARTIAL = ("nvfp4_grouped_gemm_partial", "bf16_grouped_gemm_partial")


@pytest.fixture(scope="module")
def made():
    """Four layers at TP 2, and the same with whole experts."""
    served, keys = served_at("muse_spark_open", 2, 4), Keys("sm_90a")
    plan = decode_plan(served, 8, "sm_90a", keys=keys)
    return served, plan, with_whole_experts(plan, served.backbone.experts, keys)


def expert_weights(plan):
    return {each.name: each for each in plan.buffers if each.kind is Kind.WEIGHT and ".experts." in each.name}


def test_whole_experts_are_as_many_bytes_as_slices_of_all(made):
    _, slices, whole = made

    of_slices, of_whole = expert_weights(slices), expert_weights(whole)

    names = [name for name in of_slices if name.endswith((".weight", ".weight_scales"))]
    assert len(names) == 2 + 3 * 4
    assert [nbytes(of_whole[name]) for name in names] == [nbytes(of_slices[name]) for name in names]
    assert {of_whole[name].shape[0] for name in names} == {128}


def test_each_rank_says_which_experts_it_has_and_clears_what_it_does_not_write(made):
    _, slices, whole = made

    order = [launch.operation for launch in whole.launches]

    assert order.count(CLEAR) == 4
    assert all(order[index - 1] == CLEAR for index, name in enumerate(order) if name in PARTIAL)
    numbers = [each.value for launch in whole.launches for each in launch.arguments if isinstance(each, ScalarArgument)]
    assert numbers.count(FIRST_EXPERT) == 8
    assert len(whole.launches) == len(slices.launches) + 4
    assert [first_expert(256, rank, 2) for rank in range(2)] == [0, 128]


@pytest.mark.parametrize(("tp", "experts"), [(1, 8), (2, 7)])
def test_experts_that_cannot_be_dealt_out_are_refused(tp, experts):
    served = deployment("tiny_swa", tp)
    odd = msgspec.structs.replace(served.backbone.experts, num_local_experts=experts)

    with pytest.raises(ValueError, match=f"{experts} experts for {tp} ranks"):
        with_whole_experts(decode_plan(served, 8, "sm_90a"), odd, Keys("sm_90a"))


def test_the_busiest_rank_is_what_a_step_with_whole_experts_waits_for(made):
    _, slices, whole = made
    point = decode.Point(8, 2048, 57)
    logits = forced_logits(forced(slices), 57, torch.Generator().manual_seed(3))

    busiest = busiest_rank.busiest_experts(logits, 2)

    assert list(busiest) == [f"layers.{layer}" for layer in range(4)]
    assert all(28 < each <= 57 for each in busiest.values())
    even = busiest_rank.floor_bytes(whole, point, dict.fromkeys(busiest, 28.5))
    assert even == pytest.approx(busiest_rank.floor_bytes(slices, point, {}), rel=1e-3)
    uneven = busiest_rank.floor_bytes(whole, point, dict.fromkeys(busiest, 57))
    assert uneven["experts"] == pytest.approx(2 * even["experts"], rel=1e-3)
    assert uneven["projection"] == even["projection"]


def test_a_rank_alone_is_the_busiest_of_every_layer(made):
    _, slices, _ = made
    logits = forced_logits(forced(slices), 57, torch.Generator().manual_seed(3))

    renamed = busiest_rank.busiest_first(logits, 8)

    busiest = busiest_rank.busiest_experts(logits, 8)
    for name, each in renamed.items():
        counts = (each > busiest_rank.UNLIKELY).any(dim=0).view(8, -1).sum(dim=1)
        assert int(counts[0]) == int(counts.max()) == busiest[busiest_rank.layer_of(name)]
        assert torch.equal(each.sort(dim=1).values, logits[name].sort(dim=1).values)


def test_shares_are_what_the_ranks_divide_and_norms_and_routers_are_whole(made):
    _, slices, _ = made

    shares = decode_rank.shared_out(slices)

    assert {"layers.1.qkv_gate", "layers.1.experts.down.weight", "layers.0.pooler"} <= shares
    assert not {"layers.1.router", "layers.1.router_bias", "layers.1.pre_ffn_norm", "rope.cos_sin"} & shares


def test_a_digest_changes_with_any_bit():
    values = [torch.randn(8, 64).to(torch.bfloat16), torch.randn(8, 64)]
    digest = rank_timing.Digest(values)
    before = digest()

    for value in values:
        value.view(torch.uint8)[3, 5] ^= 1
    after = digest()

    assert bool((before != after).all())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (None, []),
        (lambda every: every[1, 70].add_(1), ["hidden differs between ranks in 1 of 100", "changed in 1 replays"]),
        (lambda every: every[:, 20].add_(1), ["hidden changed in 2 replays of the same inputs"]),
        (lambda every: every.fill_(3), ["hidden is the same for all inputs"]),
    ],
)
def test_other_bits_on_a_rank_or_in_a_replay_are_told(change, said):
    block = rank_timing.BLOCK
    digests = torch.tensor([5] * block + [6] * block)[None, :, None].repeat(2, 1, 1)
    if change:
        change(digests)

    problems = rank_timing.differences(["hidden"], digests)

    assert len(problems) == len(said)
    assert all(text in problem for text, problem in zip(said, problems, strict=True))


def test_a_rank_that_fails_ends_the_others(monkeypatch):
    monkeypatch.setattr(decode_ranks, "LEFT_S", 0.2)
    lines = ("import time; time.sleep(600)", "raise SystemExit(7)")
    ranks = [subprocess.Popen([sys.executable, "-c", line]) for line in lines]

    assert decode_ranks.wait(ranks, limit=600.0) == 7
    assert all(rank.wait(timeout=60) for rank in ranks)


def test_ranks_whose_time_is_over_are_ended():
    ranks = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])]

    assert decode_ranks.wait(ranks, limit=0.2) != 0
    assert ranks[0].wait(timeout=60) < 0


def test_every_number_of_rows_meets_every_context():
    options = decode_ranks.parser().parse_args(["--pack", "x", "--world", "8", "--also-distinct", "30"])

    found = decode_ranks.points(options)

    assert len(found) == len(set(found)) == 4 * 3 + 4
    assert decode.Point(64, 131072, 222) in found
    assert decode.Point(8, 32768, 30) in found


def test_cold_ranks_that_compile_a_kernel_twice_are_told():
    reports = [
        {"seconds": 3.0, "kernels": 3, "plans": 1, "compiled": {"a": 1.0, "b": 1.5}},
        {"seconds": 4.0, "kernels": 3, "plans": 1, "compiled": {"b": 1.0, "c": 0.5}},
    ]

    found = rank_starts.summary(reports, 4.25)

    assert (found["compiles"], found["compiled_twice"], found["compiles_of_ranks"]) == (4, 1, [2, 2])
    assert found["compiler_seconds"] == 4.0


def test_a_result_becomes_a_table(tmp_path):
    def point(rows, experts, **more):
        times = {"cute": 2000.0, "cute alone": 1900.0, "stock": 5000.0}
        return {
            "point": {"rows": rows, "context": 2048, "distinct": 57},
            "experts": experts,
            "floor_us": 1000.0,
            "busiest_experts": None,
            "timings": {name: {"median_us": us} for name, us in times.items()},
            "bind_s": {"cute": 0.04},
            "problems": [],
            **more,
        }

    about = {"gpu": "G", "driver": "1", "torch": "2", "date": "d", "commit": "abc"}
    points = [
        point(8, "slices", equal_replays=1000, parts_us={"cute": {"exchanges": 300.0}}),
        point(16, "slices", timings={"cute": {"median_us": 1500.0}}),
        point(8, "whole", busiest_experts=31.25),
    ]
    result = {"about": about, "read_tb_per_s": 4.4, "tp": 2, "layers": 4, "points": points}
    result |= {"plans": 20, "kernels": 59, "load_s": [0.1, 0.25]}
    (tmp_path / "tp2_g_abc.json").write_text(json.dumps(result))
    document = tmp_path / "d.md"
    document.write_text(f"before\n{decode_ranks_table.BEGIN}\nold\n{decode_ranks_table.END}\nafter\n")

    decode_ranks_table.main([str(tmp_path / "tp2_g_abc.json"), "--into", str(document)])

    text = document.read_text()
    lone = {**result, "alone": True, "points": [point(8, "whole", timings={"cute alone": {"median_us": 1800.0}})]}
    assert "| whole ones | 8 | 2048 | 57 | 1.000 | 1.800 | 1.80 |  |  |  |  |  |  |" in decode_ranks_table.markdown(
        lone, "x"
    )
    first = "| a slice of each | 8 | 2048 | 57 | 1.000 | 2.000 | 2.00 | 0.300 | 15 % | 1.900 |  | 5.000 | 2.50 |"
    assert first in text
    assert "| a slice of each | 16 | 2048 | 57 | 1.000 | 1.500 | 1.50 |  |  |  |  |  |  |" in text
    assert "1000 replays each with M = 8" in text
    assert "31.2 distinct ones of 28.5" in text
    assert "in 0.25 s at most" in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text


@pytest.mark.parametrize(("us", "steps"), [(60.0, 133), (6800.0, 1), (1700.0, 5), (20000.0, 1), (0.5, 200)])
def test_spans_are_long_beside_what_ranks_begin_apart(us, steps):
    assert rank_timing.steps_of(us) == steps
