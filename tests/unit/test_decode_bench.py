"""What bin/bench-decode arranges: exactly so many experts, the floor, points, and the tables that its results give."""

import json

import pytest

torch = pytest.importorskip("torch")

from bench import decode, decode_table, part_times  # noqa: E402
from bench.forced_routing import DISTINCT, forced, forced_logits, index_of, reads_schedule, routes  # noqa: E402
from bench.timing import Timing  # noqa: E402
from jitspark.checking.plan_arguments import random_step, random_weights  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.backbone import decode_plan  # noqa: E402
from jitspark.plans.plan import CUTE  # noqa: E402
from jitspark.plans.reference_executor import ReferenceExecutor  # noqa: E402

ARGUMENTS = ["--pack", "x.tar"]
BYTES = ("workspace_bytes", "output_bytes", "symmetric_bytes")


@pytest.mark.parametrize("distinct", [2, 5, 8])
def test_every_layer_routes_to_as_many_experts_as_asked(distinct):
    plan, generator = forced(decode_plan(deployment("tiny", 1), 8, "sm_90a")), torch.Generator().manual_seed(1)
    step = random_step(plan, (20,), generator)
    bound = {**random_weights(plan, generator), **step.inputs, **step.kv_caches}
    executor = ReferenceExecutor(plan, {**bound, **forced_logits(plan, distinct, generator)})
    found = []

    def note(launch, arguments):
        if routes(launch):
            found.append(int(arguments[index_of(launch, DISTINCT)]))

    executor.run(after=note)

    assert found == [distinct] * 4


@pytest.mark.parametrize("distinct", [1, 9, 17])
def test_experts_that_cannot_be_are_refused(distinct):
    plan = forced(decode_plan(deployment("tiny", 1), 8, "sm_90a"))

    with pytest.raises(ValueError, match=f"cannot have {distinct} distinct"):
        forced_logits(plan, distinct, torch.Generator())


def test_the_floor_at_tp_8_is_the_weights_and_keys_that_a_step_reads():
    plan = decode_plan(deployment("muse_spark_open", 8), 8, "sm_90a")

    floor = decode._floor_bytes(plan, decode.Point(8, 32768, 57))

    one_expert = 28_311_552 / 8
    bf16_expert = 3 * 4096 * 4096 * 2 / 8
    assert floor["experts"] == pytest.approx(57 * (60 * one_expert + 2 * bf16_expert), rel=1e-3)
    assert floor["attention"] == pytest.approx(512 * (16 * 32768 + 46 * 2055), rel=1e-2)
    assert sum(floor.values()) == pytest.approx(18.81e9, rel=1e-3)


def test_a_sweep_begins_with_what_was_asked_and_has_every_size_once():
    options = decode._parser().parse_args([*ARGUMENTS, "--sweep"])

    points = decode._points(options)

    assert points[0] == decode.Point(8, 32768, 57)
    assert len(set(points)) == len(points)
    assert {point.rows for point in points} == {8, 16, 32, 64}
    assert {point.context for point in points} == {2048, 32768, 131072}


@pytest.mark.parametrize(("geometry", "tp"), [("tiny", 1), ("tiny_swa", 2)])
@pytest.mark.parametrize("name_of", [part_times.part_of, lambda launch: launch.part, lambda launch: launch.operation])
def test_parts_measured_alone_have_a_schedule_where_they_read_one(geometry, tp, name_of):
    plan = forced(decode_plan(deployment(geometry, tp), 8, "sm_90a"))
    launched = {}

    class Noting:
        """Notes what is launched instead of launching it."""

        def __init__(self):
            self.plan, self.launches = plan, []

        def launch(self, launch):
            self.launches.append(launch)

    executor = Noting()

    def timed(runs):
        for name, run in runs.items():
            executor.launches = launched[name] = []
            run()
        return {name: Timing(float(len(each)), 0.0, 0.0, 1, 1) for name, each in launched.items()}

    found = part_times.parts(executor, name_of, timed)

    names = list(map(name_of, plan.launches))
    assert found == {name: names.count(name) for name in names}
    for name in set(names):
        order = launched[name]
        assert any(map(routes, order)) or not any(map(reads_schedule, order))
        assert [each for each in order if name_of(each) == name or not routes(each)] == [
            each for each in plan.launches if name_of(each) == name
        ]


def test_a_result_becomes_tables(tmp_path):
    timing = {"median_us": 6000.0}
    point = {
        "point": {"rows": 8, "context": 32768, "distinct": 57},
        "floor_bytes": {"experts": 4.4e9},
        "floor_us": 4000.0,
        "timings": {CUTE: timing, "stock": {"median_us": 12000.0}},
        "parts_us": {CUTE: {"experts": 3000.0}, "stock": {"experts": 5000.0}},
        "operations_us": {"router_gemm": 240.0},
        "bind": {CUTE: {"seconds": 0.02, "launches": 994} | dict.fromkeys(BYTES, 2e6)},
        "capture_s": {CUTE: 0.01},
        "peak_bytes": 66e9,
    }
    about = {"gpu": "G", "driver": "1", "torch": "2", "date": "d", "commit": "abc"}
    result = {"about": about, "read_tb_per_s": 4.4, "tp": 8, "layers": 62, "points": [point]}
    (tmp_path / "r.json").write_text(json.dumps(result))
    document = tmp_path / "d.md"
    document.write_text(f"before\n{decode_table.BEGIN}\nold\n{decode_table.END}\nafter\n")

    again = {**point, "point": {"rows": 16, "context": 2048, "distinct": 102}}
    earlier = {**result, "about": {**about, "commit": "before"}, "points": [point, again]}
    (tmp_path / "e.json").write_text(json.dumps(earlier))

    decode_table.main([str(tmp_path / "r.json"), str(tmp_path / "e.json"), "--into", str(document)])

    text = document.read_text()
    assert text.count("| 8 | 32768 | 57 | 4.00 | 6.00 | 1.50 | 12.00 | 2.00 |") == 1
    assert "| 16 | 2048 | 102 | 4.00 | 6.00 | 1.50 | 12.00 | 2.00 |" in text.partition("commit before")[2]
    assert "| experts | 1.00 | 3.00 | 5.00 |" in text
    assert text.startswith("before")
    assert text.endswith("after\n")
    assert "old" not in text
