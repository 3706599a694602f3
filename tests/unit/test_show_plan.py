"""`jitspark plan`: bytes and floors against figures worked out by hand, and what people and programs read."""

import json
import sys

import pytest
from typer.testing import CliRunner

from jitspark.cache.store import Layer
from jitspark.cli.app import app
from jitspark.errors import GeometryError, UsageError
from jitspark.geometry import deployment
from jitspark.plans.backbone import decode_plan, logits_plan
from jitspark.plans.builder import Keys
from jitspark.plans.costs import Workload, costs, expected_experts
from jitspark.plans.planning import Plans, Served

TARGET = "sm_90a"
KEYS = Keys(TARGET)
TP8 = deployment("muse_spark_open", 8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JITSPARK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments):
    return CliRunner().invoke(app, ["plan", "--target", TARGET, *arguments])


def cost_of(plan, name, workload=None):
    found = dict(zip((launch.name for launch in plan.launches), costs(plan, workload or Workload()), strict=True))
    return found[name]


@pytest.fixture(scope="module")
def plan():
    return decode_plan(TP8, 8, TARGET, keys=KEYS)


# Megabytes of weights of one rank at TP 8, from the model's sizes: rows x columns x bytes.
DENSE = {
    "layers.1.qkv_gate": 2304 * 8192 * 2,
    "layers.1.o_proj": 8192 * 1024 * 2,
    "layers.1.router_pooler": 256 * 8192 * 4 + 512 * 8192 * 2,
    "layers.1.unpooler": 1024 * 4096 * 2,
}


@pytest.mark.parametrize("name", DENSE)
def test_a_dense_weight_counts_whole(plan, name):
    assert cost_of(plan, name).weights == DENSE[name]


def test_of_the_experts_only_those_that_rows_go_to_count(plan):
    workload = Workload(distinct_experts=57)
    codes, scales = 2 * 512 * 2048, 2 * 512 * 256  # of one expert's slice: half a byte a code, a scale for 16

    gate_up = cost_of(plan, "layers.1.experts.gate_up", workload)
    assert gate_up.weights == pytest.approx(57 * (codes + scales + 8) + 57 / 256 * 4)
    assert cost_of(plan, "layers.0.experts.down", workload).weights == pytest.approx(57 * 4096 * 512 * 2)
    assert expected_experts(8, 256, 8) == pytest.approx(57.4, abs=0.1)
    assert cost_of(plan, "layers.1.experts.gate_up").weights == pytest.approx(135.4e6, rel=0.01)


def test_attention_reads_what_the_rows_may_see(plan):
    token = 2 * 128 * 2  # two KV heads, keys and values, BF16

    assert cost_of(plan, "layers.1.attention").cache == 32768 * token
    assert cost_of(plan, "layers.0.attention").cache == 2055 * token
    assert cost_of(plan, "layers.0.attention", Workload(context=100)).cache == 100 * token
    assert cost_of(plan, "layers.0.append").cache == 8 * token
    two = decode_plan(TP8, 16, TARGET, keys=KEYS)
    assert cost_of(two, "layers.1.attention").cache == 2 * 32768 * token


def test_the_step_s_total_is_that_of_the_whole_shard(plan):
    """19.0 GB of weights at 57.4 distinct experts, and 316 MB of keys and values at 32,768."""
    found = costs(plan, Workload())

    assert sum(each.weights for each in found) == pytest.approx(19.0e9 - 0.414e9, rel=0.01)  # without lm_head
    assert sum(each.cache for each in found) == pytest.approx(316e6, rel=0.01)
    head = costs(logits_plan(TP8, 8, TARGET, keys=KEYS), Workload())[0]
    assert head.weights == 25256 * 8192 * 2
    assert head.seconds(4.42e12) == pytest.approx(head.total / 4.42e12)


def test_people_see_launches_keys_bytes_and_floors():
    result = run("--tp", "1", "--geometry", "tiny", "--m", "16")

    assert result.exit_code == 0
    assert "decode plan of tiny at TP 1, 16 rows, for sm_90a on" in result.stdout
    assert "58 launches of 17 kernels" in result.stdout
    assert "layers.0..3.qkv_gate" in result.stdout
    assert "total" in result.stdout.splitlines()[-1] and "us" in result.stdout.splitlines()[-1]
    every = run("--tp", "1", "--geometry", "tiny", "--m", "16", "--launches").stdout
    assert "layers.2.experts.gate_up" in every and len(every.splitlines()) > 58


def test_people_see_the_weights_contract():
    result = run("--tp", "8", "--weights")

    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    gate_up = next(line for line in lines if line.startswith("layers.1..60.experts.gate_up.weight "))
    assert gate_up.split()[1:5] == ["60", "nvfp4_gate_up_slice", "checkpoint", "twice"]
    assert any(line.startswith("layers.0..61.qkv_gate ") and " as_is " in line for line in lines)
    assert lines[-1].endswith("60.80 GB held twice")


def test_programs_get_one_json_object():
    result = run("--tp", "2", "--geometry", "tiny_swa", "--json", "--ctx", "100", "--rate", "1")
    plan = json.loads(result.stdout)
    made = decode_plan(deployment("tiny_swa", 2), 8, TARGET, keys=KEYS)

    assert plan["keys"] == [key.path for key in made.keys()]  # noqa: SIM118
    assert [each["name"] for each in plan["launches"]] == [launch.name for launch in made.launches]
    assert plan["floor_us"] == pytest.approx(plan["bytes"] / 1e12 * 1e6, rel=1e-6)
    total = sum(sum(each["bytes"].values()) for each in plan["launches"])
    assert total == pytest.approx(plan["bytes"], abs=len(made.launches) * 3)
    assert (plan["workspace_bytes"], plan["context"]) == (made.workspace_bytes, 100)


@pytest.mark.parametrize("stage", ["logits", "draft", "draft_context", "markov"])
def test_every_stage_can_be_shown(stage):
    rows = {"logits": "5", "draft": "14", "draft_context": "16", "markov": "7"}[stage]
    result = run("--tp", "1", "--geometry", "tiny", "--stage", stage, "--m", rows)

    assert result.exit_code == 0, result.exception
    assert f"{stage} plan of tiny at TP 1, {rows} rows" in result.stdout


@pytest.mark.parametrize(
    ("stage", "rows"), [("decode", 8), ("logits", 8), ("draft", 7), ("draft_context", 8), ("markov", 7)]
)
def test_without_rows_a_stage_is_shown_for_one_request(stage, rows):
    result = run("--tp", "1", "--geometry", "tiny", "--stage", stage)

    assert result.exit_code == 0, result.exception
    assert f"{stage} plan of tiny at TP 1, {rows} rows" in result.stdout


def test_a_stored_plan_is_shown_and_nothing_is_stored(cache):
    run("--tp", "1", "--geometry", "tiny")
    assert not cache.exists()
    cache.mkdir()
    served = Served("tiny", 1, TARGET, {})
    stored = Plans(served, [Layer(cache, writable=True)])
    request = next(each for each in served.requests() if each.rows == 8)
    stored.make(request)

    assert "decode plan of tiny" in run("--tp", "1", "--geometry", "tiny").stdout


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("--tp", "1", "--geometry", "tiny", "--m", "12"), UsageError, "--m: found 12 rows; needed one of 8, 16"),
        (("--tp", "1", "--geometry", "tiny", "--stage", "x"), UsageError, "--stage: found x; needed one of decode"),
        (("--tp", "3", "--geometry", "tiny"), GeometryError, "TP 3"),
        (("--tp", "1", "--geometry", "tiny", "--draw", "x.gif"), UsageError, r"--draw: found 'x\.gif'"),
        (("--tp", "1", "--geometry", "/nowhere/x.toml"), GeometryError, "/nowhere/x.toml"),
    ],
)
def test_what_no_plan_serves_is_one_error(arguments, error, text):
    result = run(*arguments)

    assert isinstance(result.exception, error)
    with pytest.raises(error, match=text):
        raise result.exception


def test_without_matplotlib_drawing_is_one_error(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("--tp", "1", "--geometry", "tiny", "--draw", str(tmp_path / "plan.svg"))

    assert isinstance(result.exception, UsageError)
    assert "found no matplotlib here" in str(result.exception) and "jitspark[plot]" in str(result.exception)
    assert not (tmp_path / "plan.svg").exists()


def test_drawing_where_nothing_can_be_written_is_one_error(tmp_path):
    result = run("--tp", "1", "--geometry", "tiny", "--draw", str(tmp_path / "missing" / "plan.svg"))

    assert isinstance(result.exception, UsageError)
    assert "missing/plan.svg: No such file or directory" in str(result.exception)


def test_a_plan_is_drawn(tmp_path):
    for name in ("plan.svg", "plan.png"):
        run("--tp", "8", "--draw", str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 10_000
