"""What the benchmark measures, and that its report says what the file says."""

import io
import json
import tarfile

import pytest

torch = pytest.importorskip("torch")

from bench import measure, table, workload  # noqa: E402
from bench.baselines import Baseline  # noqa: E402
from bench.check import every_case  # noqa: E402
from bench.packed_cache import specialization_of  # noqa: E402
from bench.parts import launches, measured  # noqa: E402
from jitspark.checking.arguments import reference_function  # noqa: E402
from jitspark.checking.packed import load_kernels, unpack  # noqa: E402
from jitspark.errors import MissingEntriesError, PackError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.registry import kernel_names, load_spec, specializations  # noqa: E402

TARGET = "sm_90a"
BOUNDARY = load_spec("gated_residual_rmsnorm")


def boundary_work(rotation_bytes=1_000_000):
    case = next(case for case in BOUNDARY.cases if case.axes["num_tokens"] == 8)
    generator = torch.Generator().manual_seed(0)
    return workload.build(BOUNDARY.specialize_case(case), case.axes, generator, rotation_bytes)


def test_every_case_of_every_spec_is_checked():
    listed = every_case(TARGET)

    assert all(case in [item.case for item in listed] for name in kernel_names() for case in load_spec(name).cases)


def most_rows(name):
    """How many rows the kernel serves: those of every step, where its statics say nothing else."""
    return max(load_spec(name).statics.get("max_tokens", (64,)))


@pytest.mark.parametrize("name", kernel_names())
def test_every_number_of_rows_of_a_step_is_checked(name):
    work = every_case(TARGET, [name])

    rows = {item.case.axes.get("num_tokens") for item in work}
    counts_requests = name in ("markov_gumbel_sampling", "draft_logits_store")  # with rows of their own for each
    assert rows >= set(range(8, most_rows(name) + 1, 8)) or counts_requests or "num_tokens" not in load_spec(name).axes


def test_every_spec_has_cases():
    assert [name for name in kernel_names() if not load_spec(name).cases] == []


def test_weights_rotate_over_the_bytes_asked_for_and_never_share_memory():
    sets = boundary_work().sets

    weights = {values[name].data_ptr() for values in sets for name in ("alpha", "beta", "weight")}
    assert len(weights) == 3 * len(sets)
    assert sum(values[name].nbytes for values in sets for name in ("alpha", "beta", "weight")) >= 1_000_000


def test_a_boundary_chain_depends_on_itself():
    sets = boundary_work().sets

    for before, values in zip([sets[-1], *sets[:-1]], sets, strict=True):
        assert values["branch"] is before["activation"]
        assert values["branch"] is not values["activation"]
        assert values["stream"] is sets[0]["stream"]


def test_moved_bytes_count_inputs_once_and_updates_twice():
    rows = 8 * 8192
    assert boundary_work().moved_bytes == rows * 2 + rows * 4 * 2 + 8192 * (4 + 4 + 2) + rows * 2


def test_a_cache_and_a_table_count_by_the_rows_that_are_touched():
    spec = load_spec("qk_rmsnorm_rope_paged_kv_append")
    case = next(case for case in spec.cases if case.axes["num_tokens"] == 8 and case.statics["rope"])
    moved = workload.moved_bytes(spec.specialize_case(case), case.axes)

    row, heads = case.axes["qkvg_size"], case.axes["num_kv_heads"]
    assert moved == 8 * (2 * row * 2 + 8 + 64 * 4 + 8 + heads * 128 * 2)


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.1, False)])
def test_what_is_timed_is_held_to_the_reference_first(factor, right):
    work = boundary_work()

    def scaled_reference(values):
        reference_function(work.specialization)(*values.values(), **work.specialization.statics)
        values["activation"].mul_(factor)

    found = measure._check(Baseline("stand-in", scaled_reference), work)

    assert {each.argument for each in found} == {"stream", "activation"}
    assert all(each.margin <= measure.BASELINE_SLACK for each in found) == right


def test_an_output_that_a_baseline_returns_is_checked_too():
    work = boundary_work()

    def returns_zeros(values):
        return {"activation": torch.zeros_like(values["activation"]), "stream": values["stream"]}

    assert max(each.margin for each in measure._check(Baseline("stand-in", returns_zeros), work)) > 100


def test_a_launch_is_held_to_the_bounds_of_its_epilogue():
    made = deployment("muse_spark_open", 4)
    gated = [each for each in specializations(made, ["skinny_gemm_bf16"]) if each.statics["epilogue"] == "silu_mul"]

    assert gated
    assert {measure._nearest_case(each).statics["epilogue"] for each in gated} == {"silu_mul"}


def test_negative_zeros_among_codes_are_no_difference_to_a_baseline():
    from bench.baselines import _unsigned_zeros

    case = load_spec("rmsnorm_nvfp4_quantize").cases[2]
    work = workload.build(
        load_spec("rmsnorm_nvfp4_quantize").specialize_case(case), case.axes, torch.Generator().manual_seed(1), 1
    )

    def codes_with(change):
        def call(values):
            reference_function(work.specialization)(*values.values(), **work.specialization.statics)
            values["codes"].copy_(change(values["codes"]))

        who = Baseline("stand-in", call, differing=0.02, alike=_unsigned_zeros)
        return max(each.margin for each in measure._check(who, work))

    assert codes_with(lambda codes: torch.where(codes == 0x88, 0, codes)) == 0.0
    assert codes_with(lambda codes: codes ^ 1) > measure.BASELINE_SLACK


def measured_kernels():
    made = deployment("muse_spark_open", 8)
    return [name for name in kernel_names() if any(measured(each) for each in specializations(made, [name]))]


@pytest.mark.parametrize("name", measured_kernels())
def test_each_token_count_is_served_once_by_the_tightest_specialization(name):
    made = deployment("muse_spark_open", 8)
    listed = list(launches("muse_spark_open", made, TARGET, (8, 64), [name]))
    asked = specializations(made, [name])

    seen = [(entry["part"], entry["axes"]["num_tokens"], json.dumps(entry["dtypes"])) for entry in listed]
    assert len(seen) == len(set(seen)), "two launches of one name"
    assert {num_tokens for _, num_tokens, _ in seen} == {rows for rows in (8, 64) if rows <= most_rows(name)}
    for entry in listed:
        assert specialization_of(entry) in asked


def result(median=2.0, wrong=None):
    timing = {"p10_us": 1.9, "p90_us": 2.2, "launches": 10, "replays": 30}
    about = {
        "gpu": "G",
        "driver": "1",
        "torch": "2",
        "cuda": "13",
        "triton": "3",
        "commit": "abc",
        "date": "2026-11-30",
    }
    launch = {"part": "qkv+gate", "tp": 8, "kernel": "k", "recipe": "q", "axes": {"num_tokens": 8}}
    return {
        "about": about,
        "read_tb_per_s": 4.4,
        "layers": [],
        "launches": [
            {
                "launch": launch,
                "moved_bytes": 4_400_000,
                "floor_us": 1.0,
                "aim_us": 2.2,
                "timings": {
                    "jitspark": {**timing, "median_us": median},
                    "slow": {**timing, "median_us": 9.0},
                    "cuBLAS": {**timing, "median_us": 3.0},
                },
                "warm_timings": {},
                "wrong": wrong or {},
            }
        ],
    }


def test_a_table_row_names_the_fastest_other_and_whether_the_aim_was_met():
    text = table.markdown(result(), "x.json")

    assert "| qkv+gate | 4.40 | 1.00 | 2.00 (1.90..2.20) | 2.20 |  | 2.00 | cuBLAS | 3.00 | 1.50 | 2.20 met |" in text
    assert "2.20 **missed**" in table.markdown(result(median=2.3), "x.json")
    assert "qkv+gate, M = 8, cuBLAS: far off" in table.markdown(result(wrong={"cuBLAS": "far off"}), "x.json")


def test_results_replace_only_what_stands_between_the_markers():
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"

    assert table.replace_section(text, "new") == f"before\n{table.BEGIN}\n\nnew\n\n{table.END}\nafter\n"
    with pytest.raises(SystemExit):
        table.replace_section("no markers", "new")


def packed(path, name):
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo(name)
        member.size = 1
        archive.addfile(member, io.BytesIO(b"x"))
    return path


def test_a_pack_that_leaves_its_folder_is_refused(tmp_path):
    with pytest.raises(PackError):
        unpack(packed(tmp_path / "pack.tar", "../outside"), tmp_path / "root")

    assert not (tmp_path / "outside").exists()


def test_an_unpacked_root_can_be_read_from_whatever_the_umask(tmp_path, monkeypatch):
    import os

    before = os.umask(0)
    monkeypatch.setattr(os, "umask", os.umask)
    try:
        root = unpack(packed(tmp_path / "pack.tar", "artifacts-v1/a/b"), tmp_path / "root")
    finally:
        os.umask(before)

    assert [path.stat().st_mode & 0o022 for path in (root / "artifacts-v1", root / "artifacts-v1/a")] == [0, 0]


def test_a_cache_without_the_entries_names_every_one_that_is_missing(tmp_path):
    work = every_case(TARGET, ["rmsnorm"])[:3]

    with pytest.raises(MissingEntriesError) as caught:
        load_kernels(tmp_path, [item.specialization for item in work], TARGET)

    assert len(caught.value.keys) == len({item.specialization.title() for item in work})


def part_result(median=9.0, aim=8.0):
    timing = {"p10_us": 8.9, "p90_us": 9.1, "launches": 10, "replays": 30}
    launch = {"kernel": "k", "recipe": "r"}
    return {
        "part": {"part": "attention", "tp": 8, "num_tokens": 8, "launches": {"attention": launch}},
        "moved_bytes": 18_000_000,
        "floor_us": 4.5,
        "aim_us": aim,
        "timings": {"jitspark": {**timing, "median_us": median}, "FA3": {**timing, "median_us": 18.0}},
        "wrong": {},
        "absent": ["Marlin (no module named vllm)"],
    }


def test_a_part_names_every_contender_and_what_was_absent():
    took = {"kernel": "k", "registers": 90, "stack_bytes": 0, "local_bytes": 8, "shared_bytes": 1024}
    text = table.markdown({**result(), "parts": [part_result()], "resources": {"r": took}}, "x.json")

    row = "| attention | 18.00 | 4.50 | 9.00 (8.90..9.10) | 2.00 | 2.00 | FA3 18.00 (2.00); absent: Marlin |"
    assert f"{row} 8.00 **missed** |" in text
    assert "| `k` | 1 | 90 | 1024 | 8 | 2.20 |" in text  # of the launch alone, not of the part


def test_a_table_says_what_a_run_did_not_get_to_and_what_went_wrong():
    failed = [{"part": "router, TP 8, M = 8", "problem": "RuntimeError: no memory"}]
    text = table.markdown(
        {**result(), "failed": failed, "not_reached": ["lm_head, TP 8, M = 64", "router, TP 8, M = 64"]}, "x.json"
    )

    assert "* router, TP 8, M = 8: RuntimeError: no memory" in text
    assert "time was over: lm_head, TP 8, M = 64 and the 1 behind it." in text


def test_shared_memory_follows_from_the_tiling():
    from bench.resources import dynamic_shared_bytes

    made = specializations(deployment("muse_spark_open", 8))
    assert all(0 <= dynamic_shared_bytes(each) <= 227 * 1024 for each in made)
    rings = {each.name for each in made if dynamic_shared_bytes(each) >= 64 * 1024}
    assert {
        "skinny_gemm_bf16",
        "grouped_skinny_gemm_bf16",
        "paged_gqa_verify_attention",
        "bf16_grouped_gemm_swiglu",
        "nvfp4_grouped_gemm_swiglu",
    } <= rings


def test_a_later_result_adds_only_what_an_earlier_one_has_not():
    first, second = result(), result()
    second["launches"] = [*second["launches"], {**result()["launches"][0]}]
    launch = {**second["launches"][1]["launch"], "axes": {"num_tokens": 16}}
    second["launches"][1] = {**second["launches"][1], "launch": launch}

    added = table.without({**second, "parts": [part_result()]}, [{**first, "parts": [part_result()]}])

    assert [each["launch"]["axes"]["num_tokens"] for each in added["launches"]] == [16]
    assert added["parts"] == []
