"""Stored plans: found by what they are asked for, checked, made anew where that is allowed, else refused."""

import os
import stat
from dataclasses import fields, replace

import pytest

from jitspark.cache.store import PLANS, Layer
from jitspark.errors import CacheDirectoryError, GeometryError, PlanError
from jitspark.geometry import deployment
from jitspark.plans import request as plan_request
from jitspark.plans.backbone import decode_plan
from jitspark.plans.format import to_bytes
from jitspark.plans.plan import Stage
from jitspark.plans.planning import Plans, Served
from jitspark.plans.request import PlanRequest, geometry_files, sources_digest
from jitspark.plans.store import PlanStore, keep, put_bytes

TARGET = "sm_90a"
SERVED = Served("tiny", 1, TARGET, {})
REQUEST = SERVED.request(Stage.DECODE, 16)


@pytest.fixture
def layer(tmp_path):
    (tmp_path / "cache").mkdir()
    return Layer(tmp_path / "cache", writable=True)


@pytest.fixture(scope="module")
def plan():
    return decode_plan(deployment("tiny", 1), 16, TARGET)


def file_of(layer, request=REQUEST):
    return layer.root / PLANS / f"{request.digest}.json"


def overwrite(path, content):
    path.chmod(0o644)
    path.write_bytes(content)


def test_a_stored_plan_is_found_by_its_request(layer, plan):
    path = PlanStore([layer]).put(REQUEST, plan)

    assert path == file_of(layer)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert os.listdir(layer.root / "staging") == []
    assert PlanStore([layer]).find(REQUEST) == plan
    assert PlanStore([layer]).find(SERVED.request(Stage.DECODE, 24)) is None
    assert (PlanStore([layer]).has(REQUEST), PlanStore([]).has(REQUEST)) == (True, False)


def test_layers_are_searched_in_their_order_and_only_the_writable_one_is_written(tmp_path, layer, plan):
    (tmp_path / "image").mkdir()
    image = Layer(tmp_path / "image", writable=False)
    store = PlanStore([image, layer])
    store.put(REQUEST, plan)

    assert not (image.root / PLANS).exists()
    assert store.find(REQUEST) == plan
    put_bytes(replace(image, writable=True), REQUEST.digest, b"no plan")
    with pytest.raises(PlanError, match=f"{image.root}/plans-v1/{REQUEST.digest}"):
        store.find(REQUEST)
    assert PlanStore([image]).put(REQUEST, plan) is None


def test_the_request_s_digest_tells_apart_all_that_decides_a_plan():
    changed = {
        "stage": Stage.LOGITS,
        "geometry": geometry_files("tiny_swa"),
        "tp": 2,
        "rows": 24,
        "target": "sm_100a",
        "providers": {"attention": "stock"},
        "options": {"rope": False},
    }
    assert changed.keys() == {field.name for field in fields(PlanRequest)}

    digests = {replace(REQUEST, **{name: value}).digest for name, value in changed.items()}
    assert len(digests | {REQUEST.digest}) == len(changed) + 1


def test_a_changed_geometry_and_changed_sources_ask_for_another_plan(tmp_path, monkeypatch):
    built_in = plan_request.GEOMETRIES
    for name in ("tiny", "tiny_dspark"):
        (tmp_path / f"{name}.toml").write_text((built_in / f"{name}.toml").read_text() + "\n# a comment\n")
    same = geometry_files(tmp_path / "tiny.toml")
    assert same == geometry_files("tiny")

    text = (tmp_path / "tiny_dspark.toml").read_text()
    (tmp_path / "tiny_dspark.toml").write_text(text.replace("markov_rank = 32", "markov_rank = 64"))
    geometry_files.cache_clear()
    assert geometry_files(tmp_path / "tiny.toml").digest != same.digest

    before = REQUEST.digest
    monkeypatch.setattr(plan_request, "sources_digest", lambda: "other sources")
    assert REQUEST.digest != before


def test_a_geometry_that_cannot_be_read_is_one_error(tmp_path):
    (tmp_path / "bad.toml").write_text("kind = ")
    (tmp_path / "alone.toml").write_text('name = "alone"\ndraft = "tiny_dspark"\n')
    (tmp_path / "alone_dspark.toml").write_text('num_speculative_tokens = "seven"\n')
    (tmp_path / "wrong.toml").write_text('name = "wrong"\ndraft = "alone_dspark"\n')

    for name in ("bad", "missing", "wrong"):
        with pytest.raises(GeometryError, match=f"{name}.toml"):
            geometry_files(tmp_path / f"{name}.toml")
    assert geometry_files(tmp_path / "alone.toml").query_length == 8


def test_the_sources_are_those_of_the_makers_and_of_the_kernels():
    """A module of ours that a maker imports decides what a plan holds, unless it is named here as one that does not."""
    import ast

    indifferent = {
        "errors", "geometry_constraints", "geometry_file", "key", "plans/checks", "registry", "source_digest", "target",
        "toolchain",
    }  # fmt: skip
    known, left = set(), ["plans/backbone", "plans/draft", "plans/markov"]
    while left:
        name = left.pop()
        if name in known:
            continue
        known.add(name)
        for node in ast.walk(ast.parse((plan_request.PACKAGE / f"{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "jitspark":
                module = "/".join(node.module.split(".")[1:])
                names = [alias.name for alias in node.names]
                modules = {"": names, "plans": [f"plans/{name}" for name in names]}.get(module, [module])
                left += [name for name in modules if name not in indifferent | known]
    assert known - set(plan_request.MAKERS) == set()
    assert set(plan_request.MAKERS) - known <= {"constraints", "plans/format", "plans/reader"}
    assert len(sources_digest()) == 64


def test_missing_plans_are_one_error_with_the_command_that_makes_them(layer):
    requests = [SERVED.request(Stage.DECODE, rows) for rows in (8, 16)]

    with pytest.raises(PlanError) as caught:
        Plans(SERVED, [layer], may_make=False).get_all(requests)

    assert "no decode plan of tiny at TP 1 for 8 rows on sm_90a and 1 more" in str(caught.value)
    assert "`jitspark warm --geometry tiny --tp 1 --target sm_90a`" in str(caught.value)


DAMAGES = {
    "cut short": lambda content: content[:-40],
    "empty": lambda _: b"",
    "a byte changed": lambda content: content.replace(b"qkvg", b"qkvh", 1),
    "another plan": lambda _: to_bytes(decode_plan(deployment("tiny", 1), 8, TARGET)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_plan_is_refused_where_none_may_be_made_and_made_anew_elsewhere(layer, plan, warnings, name):
    PlanStore([layer]).put(REQUEST, plan)
    overwrite(file_of(layer), DAMAGES[name](to_bytes(plan)))

    with pytest.raises(PlanError, match=f"{file_of(layer)}.*jitspark warm"):
        Plans(SERVED, [layer], may_make=False).get(REQUEST)
    assert Plans(SERVED, [layer]).get(REQUEST) == plan
    assert [text for text in warnings() if "is made anew" in text and str(file_of(layer)) in text]
    assert PlanStore([layer]).find(REQUEST) == plan


def test_a_plan_for_other_requests_or_another_host_is_no_answer(plan):
    assert REQUEST.is_answered_by(plan)
    for changed in ({"query_length": 4}, {"host": "another-linux"}, {"rows": 8}, {"tp": 2}):
        assert not REQUEST.is_answered_by(replace(plan, **changed)), changed


def test_a_link_and_a_file_that_others_may_change_are_refused(tmp_path, layer, plan):
    (layer.root / PLANS).mkdir(mode=0o755)
    (tmp_path / "elsewhere.json").write_bytes(to_bytes(plan))
    file_of(layer).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(PlanError, match="a link"):
        PlanStore([layer]).find(REQUEST)

    file_of(layer).unlink()
    PlanStore([layer]).put(REQUEST, plan)
    file_of(layer).chmod(0o666)
    with pytest.raises(PlanError, match="writable by others"):
        PlanStore([layer]).find(REQUEST)


def test_a_root_that_cannot_be_written_is_one_error(layer, plan):
    (layer.root / PLANS).write_text("a file where a folder belongs")

    with pytest.raises(CacheDirectoryError, match="cache directory"):
        PlanStore([layer]).put(REQUEST, plan)


def test_every_plan_of_a_deployment_is_made_once_and_then_found(layer):
    requests = list(SERVED.requests())
    made = [Plans(SERVED, [layer]).get(each) for each in requests]
    found = Plans(SERVED, [layer], may_make=False).get_all(requests)

    assert found == made
    assert all(request.is_answered_by(plan) for request, plan in zip(requests, made, strict=True))
    stages = [each.stage for each in requests]
    assert {stage: stages.count(stage) for stage in Stage} == {
        Stage.DECODE: 8,
        Stage.LOGITS: 64,
        Stage.DRAFT: 8,
        Stage.DRAFT_CONTEXT: 8,
        Stage.MARKOV: 8,
    }


def test_a_plan_that_is_wanted_again_is_as_good_as_new(layer, plan):
    PlanStore([layer]).put(REQUEST, plan)
    os.utime(file_of(layer), (0, 0))

    keep(layer, REQUEST)

    assert file_of(layer).stat().st_mtime > 1e9
    keep(layer, SERVED.request(Stage.DECODE, 8))  # nothing there: nothing happens


def test_loading_needs_neither_specs_nor_a_geometry_library(layer, plan):
    """In a process of its own, which then says what it has imported."""
    import subprocess
    import sys

    PlanStore([layer]).put(REQUEST, plan)
    code = (
        "import sys, pathlib\n"
        "from jitspark.plans.planning import Plans, Served\n"
        "from jitspark.plans.plan import Stage\n"
        "from jitspark.cache.store import Layer\n"
        "served = Served('tiny', 1, 'sm_90a', {})\n"
        f"layer = Layer(pathlib.Path({str(layer.root)!r}), writable=False)\n"
        "plan = Plans(served, [layer], may_make=False).get(served.request(Stage.DECODE, 16))\n"
        "print(len(plan.launches), sorted(n for n in sys.modules if n in ('msgspec', 'torch', 'cutlass', 'rich')"
        " or n.startswith('kernel_specs.')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == f"{len(plan.launches)} []"
