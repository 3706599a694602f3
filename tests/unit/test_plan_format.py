"""Plans as bytes: the same again when read, one text for one plan, and anything else refused with one error."""

import hashlib
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jitspark.errors import PlanError
from jitspark.geometry import deployment
from jitspark.plans.backbone import decode_plan, logits_plan
from jitspark.plans.builder import Keys
from jitspark.plans.checks import PlanChecker
from jitspark.plans.draft import context_plan, draft_plan
from jitspark.plans.format import digest_in, keys_in, to_bytes
from jitspark.plans.plan import VERSION
from jitspark.plans.reader import PlanReader

TARGET = "sm_90a"
KEYS = Keys(TARGET)
TINY = deployment("tiny_swa", 2)
PLAN = decode_plan(TINY, 16, TARGET, keys=KEYS)
KEYS_OF_PLAN = PLAN.keys()
BYTES = to_bytes(PLAN)


def read(content):
    return PlanReader().read(content, "a file")[0]


def resealed(content, change):
    """The plan with `change` made to its parsed values, under a digest that is right."""
    values = json.loads(content)
    change(values)
    lines = [f'"{name}":{json.dumps(values[name])}' for name in ("frame", "keys", "plan") if name in values]
    rest = (",\n".join(lines) + "}\n").encode()
    return b'{"digest":"%s",\n%s' % (hashlib.sha256(rest).hexdigest().encode(), rest)


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        decode_plan(deployment("tiny", 1), 8, TARGET, keys=KEYS),
        decode_plan(TINY, 64, TARGET, keys=KEYS, providers={"attention": "stock"}),
        decode_plan(deployment("muse_spark_open", 16), 24, TARGET, keys=KEYS),
        logits_plan(TINY, 7, TARGET, keys=KEYS),
        draft_plan(deployment("tiny", 1), 14, TARGET, keys=KEYS),
        context_plan(deployment("tiny", 1), 16, TARGET, keys=KEYS),
    ],
    ids=lambda plan: f"{plan.stage}-{plan.geometry}-{plan.tp}-{plan.rows}",
)
def test_what_was_written_is_read(plan):
    again = read(to_bytes(plan))

    assert again == plan
    assert to_bytes(again) == to_bytes(plan)
    assert [type(each) for launch in again.launches for each in launch.statics.values()] == [
        type(each) for launch in plan.launches for each in launch.statics.values()
    ]


def test_a_file_is_one_json_object_with_its_keys_and_digest():
    values = json.loads(BYTES)

    assert values["keys"] == [f"{each.target}-{each.host}/{each.kernel}/{each.recipe}" for each in KEYS_OF_PLAN]
    assert values["digest"] == digest_in(BYTES)
    assert keys_in(BYTES, "a file") == KEYS_OF_PLAN


def test_plans_for_other_rows_have_the_same_frame_and_it_is_read_once():
    reader = PlanReader()
    first, frame = reader.read(BYTES, "a file")
    other = decode_plan(TINY, 8, TARGET, keys=KEYS)
    second, same = reader.read(to_bytes(other), "another file")

    assert same is frame
    assert (first, second) == (PLAN, other)


def test_plans_of_other_launches_have_another_frame():
    """Router and pooler are one launch for few rows only."""
    reader = PlanReader()
    frame = reader.read(BYTES, "a file")[1]
    plans = [decode_plan(TINY, rows, TARGET, keys=KEYS) for rows in (24, 64)]
    found = [reader.read(to_bytes(plan), "another file") for plan in plans]

    assert [plan for plan, _ in found] == plans
    assert found[0][1] is found[1][1] is not frame
    assert reader.read(to_bytes(logits_plan(TINY, 8, TARGET, keys=KEYS)), "a third")[1] is not frame


@given(st.integers(0, len(BYTES) - 1), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place, change):
    changed = bytearray(BYTES)
    changed[place] ^= change

    with pytest.raises(PlanError, match="a file: found"):
        read(bytes(changed))


@given(st.integers(0, len(BYTES) - 1))
def test_a_file_cut_short_is_noticed(length):
    with pytest.raises(PlanError, match="a file: found"):
        read(BYTES[:length])


def test_another_version_is_refused_and_both_are_said():
    with pytest.raises(PlanError, match=rf"version {VERSION + 1}; needed a plan of version {VERSION}\. Remove it and"):
        read(resealed(BYTES, lambda values: values["plan"].update(version=VERSION + 1)))


WRONG = {
    "no frame": lambda values: values.pop("frame"),
    "no version": lambda values: values["plan"].pop("version"),
    "no header": lambda values: values["plan"].pop("tp"),
    "keys that are none": lambda values: values.update(keys=["../../etc/passwd"]),
    "a key that is no text": lambda values: values.update(keys=[7]),
    "an unknown stage": lambda values: values["plan"].update(stage="encode"),
    "an unknown kind of buffer": lambda values: values["frame"]["buffers"]["kind"].__setitem__(0, "register"),
    "a place behind the table": lambda values: values["frame"]["launches"]["arguments"][0].__setitem__(0, 99999),
    "a place before the table": lambda values: values["frame"]["launches"]["arguments"][0].__setitem__(0, -1),
    "a key's place before the table": lambda values: values["plan"]["keys"].__setitem__(1, -1),
    "a column cut short": lambda values: values["frame"]["launches"]["name"].pop(),
    "fewer places than launches": lambda values: values["plan"]["keys"].pop(),
    "fewer shapes than buffers": lambda values: values["plan"]["shapes"].pop(),
    "a buffer that is no number": lambda values: values["frame"]["arguments"].__setitem__(
        0, ["qkvg", "in", False, None]
    ),
    "launches that are no table": lambda values: values["frame"].update(launches=[]),
    "a plan that is a list": lambda values: values.update(plan=[]),
    "statics that are no mapping": lambda values: values["plan"].update(statics=[3]),
    "no rows": lambda values: values["plan"].update(rows=0),
    "a query of no tokens": lambda values: values["plan"].update(query_length=0),
    "no ranks": lambda values: values["plan"].update(tp=-1),
    "a workspace below nothing": lambda values: values["plan"].update(workspace_bytes=-1),
    "an exchange below nothing": lambda values: values["plan"].update(symmetric_bytes=-1),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_form_is_one_error(name):
    content = resealed(BYTES, WRONG[name])

    with pytest.raises(PlanError, match=r"a file: found .*; needed .*\. Remove it and run `jitspark warm`"):
        read(content)


def test_random_changes_under_a_right_digest_are_refused_or_a_plan_that_can_be_checked():
    """Nothing but PlanError leaves reader and checker, whatever stands where a value belongs."""
    values, draw = json.loads(BYTES), random.Random(0)
    refused = 0
    for _ in range(300):
        content = resealed(BYTES, lambda parsed: _replace_somewhere(parsed, draw))
        try:
            plan, frame = PlanReader().read(content, "a file")
            PlanChecker().require(plan, "a file", frame)
        except PlanError:
            refused += 1
    assert refused > 100
    assert values == json.loads(BYTES)


def _replace_somewhere(values, draw):
    """Another value in one place of the object, found by a random walk from its top."""
    here, way = values, []
    while isinstance(here, (dict, list)) and here and (len(way) < 2 or draw.random() < 0.8):
        step = draw.choice(sorted(here) if isinstance(here, dict) else range(len(here)))
        way.append((here, step))
        here = here[step]
    owner, step = way[-1]
    owner[step] = draw.choice([None, -1, 10**12, "x", [], {}, [0], True, 1.5, "cute", 3])


def test_two_keys_of_one_kernel_do_not_mix():
    other = decode_plan(TINY, 64, TARGET, keys=KEYS)
    chosen = replace(
        PLAN, launches=(*PLAN.launches, *(replace(each, name=f"{each.name}.2") for each in other.launches))
    )

    assert read(to_bytes(chosen)).launches == chosen.launches
