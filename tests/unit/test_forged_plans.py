"""Whatever bytes a plan file holds: reader and checker refuse it with PlanError, or take a plan that is safe to bind.

Every field of real plans is given values of other types and sizes, under a digest that is right.
"""

import hashlib
import json
import random

import pytest

from jitspark.errors import PlanError
from jitspark.geometry import deployment
from jitspark.plans.backbone import decode_plan
from jitspark.plans.builder import Keys
from jitspark.plans.checks import MAX_BYTES, PlanChecker
from jitspark.plans.format import to_bytes
from jitspark.plans.markov import markov_plan
from jitspark.plans.plan import Kind
from jitspark.plans.reader import PlanReader
from jitspark.spec import DTYPE_BYTES

TARGET = "sm_90a"
KEYS = Keys(TARGET)
TINY = deployment("tiny_swa", 2)
PLANS = {  # between them they have every kind of buffer, views, numbers and names of numbers
    "decode": to_bytes(decode_plan(TINY, 8, TARGET, keys=KEYS)),
    "markov": to_bytes(markov_plan(TINY, 2, TARGET, keys=KEYS, multiplier=0.5, soft_cap=30.0)),
}
SAMPLES = 2  # places of each field
# JSON by type. Written as text, since some of it is more than json.dumps writes
VALUES = {
    "null": ["null"],
    "truth": ["true", "false"],
    "integer": ["-1", "0", "1", "3", str(2**31), str(2**60), str(-(2**62)), str(2**64), "1" * 4000, "1" * 5000],
    "fraction": ["1.5", "NaN", "Infinity", "1e999"],
    "text": ['""', '"x"', '"cute"', '"in"', '"\\ud800"', '"\\u001b[2J"', '"../x"', f'"{"y" * 100_000}"'],
    "exact": ['{"float":"0x1p99999"}', '{"float":"inf"}', '{"float":"x"}', '{"float":7}', '{"float":"0x1p3","a":1}'],
    "table": ["{}", '{"x":1}', '{"name":[]}'],
    "list": ["[]", "[0]", "[null]", '["x"]', "[[]]", "[1,1]", "[1,1,1,1]", f"[{'7,' * 10_000}7]"],
    "deep": ["[" * depth + "]" * depth for depth in (300, 900, 100_000)] + ['{"a":' * 900 + "1" + "}" * 900],
}
HOLE = "a hole in the plan"
# what fields hold besides what these plans have in them: numbers by name, names by number, and a table of anything
ALSO = {
    ("frame", "arguments", "*", 0): {"integer", "text", "exact"},
    ("frame", "arguments", "*", 3): {"null"},
    ("frame", "buffers", "shape", "*", "*"): {"integer", "text"},
    ("frame", "buffers", "strides", "*"): {"list", "integer", "text"},
    ("plan", "providers"): {"exact"},
    ("plan", "shapes", "*", "*"): {"text"},
    ("plan", "statics", "*"): {"truth", "integer", "text", "exact"},
}


def type_of(value):
    if isinstance(value, dict):
        return "exact" if value.keys() == {"float"} else "table"
    kinds = {type(None): "null", bool: "truth", int: "integer", str: "text", list: "list"}
    return kinds[type(value)]


def fields(value, way=(), name=()):
    """Every place in a plan's values, and the field that it belongs to: places of one list are one field."""
    yield way, name, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, item in items:
        # rows of sources and of arguments have values of their own kind in each place
        part = step if isinstance(step, str) or name[1:] in (("sources", "*"), ("arguments", "*")) else "*"
        yield from fields(item, (*way, step), (*name, part))


def forged(content, way, text):
    """The file with JSON `text` in one place."""
    values = json.loads(content)
    here = values
    for step in way[:-1]:
        here = here[step]
    here[way[-1]] = HOLE
    return sealed(values, lambda line: line.replace(f'"{HOLE}"', text))


def sealed(values, last=str):
    """A file of these values, its digest right."""
    lines = [f'"{name}":{json.dumps(values[name])}' for name in ("frame", "keys", "plan") if name in values]
    rest = (last(",\n".join(lines)) + "}\n").encode()
    return b'{"digest":"%s",\n%s' % (hashlib.sha256(rest).hexdigest().encode(), rest)


def changed(content, way, change):
    """The file with `change` made to what holds a place, and its name there."""
    values = json.loads(content)
    here = values
    for step in way[:-1]:
        here = here[step]
    change(here, way[-1])
    return sealed(values)


def accepted(content):
    """The plan, or None where it is refused; what is refused can be shown."""
    try:
        plan, frame = PlanReader().read(content, "a file")
        PlanChecker().require(plan, "a file", frame)
    except PlanError as problem:
        text = str(problem)
        assert text.encode().isascii() or text.isprintable()
        assert len(text) < 3000, text[:200]
        assert "jitspark warm" in text
        return None
    return plan


def require_safe(plan):
    """What is allocated is bounded, every launch has a name of its own, and what was taken can be written again."""
    sizes = [plan.workspace_bytes, plan.symmetric_bytes]
    for buffer in plan.buffers:
        if buffer.kind in (Kind.OUTPUT, Kind.PEERS):
            count = DTYPE_BYTES[buffer.dtype]
            for size in buffer.shape:
                assert type(size) is int and size > 0, buffer
                count *= size
            sizes.append(count)
        assert buffer.strides is None or len(buffer.strides) == len(buffer.shape)
    assert min(sizes) >= 0 and sum(sizes) <= MAX_BYTES
    assert len({launch.name for launch in plan.launches}) == len(plan.launches)
    again, _ = PlanReader().read(to_bytes(plan), "the same")
    assert again == plan


def chosen_places(content):
    """(field, types it may have, some of its places) of the plan's values: seeded."""
    draw, places, types = random.Random(7), {}, {}
    values = json.loads(content)
    del values["digest"]
    for way, name, value in fields(values):
        if way:
            places.setdefault(name, []).append(way)
            types.setdefault(name, set()).add(type_of(value))
    return [(name, types[name], draw.sample(ways, min(SAMPLES, len(ways)))) for name, ways in places.items()]


@pytest.mark.parametrize("stage", PLANS)
def test_values_of_another_type_are_refused_in_every_field(stage):
    content = PLANS[stage]
    assert accepted(content) is not None
    checked = set()
    for name, types, ways in chosen_places(content):
        for kind, texts in VALUES.items():
            if kind in types or any(kind in also and name[: len(field)] == field for field, also in ALSO.items()):
                continue
            for text in texts:
                assert accepted(forged(content, ways[0], text)) is None, (name, text[:80])
                checked.add(name)
    assert len(checked) > 40


@pytest.mark.parametrize("stage", PLANS)
def test_values_of_a_field_s_own_type_are_refused_or_safe(stage):
    content, refused, taken = PLANS[stage], 0, 0
    for _, types, ways in chosen_places(content):
        texts = [text for kind in types for text in VALUES[kind]] + VALUES["deep"] * bool(types & {"list", "table"})
        for way in ways:
            for text in texts:
                plan = accepted(forged(content, way, text))
                refused, taken = refused + (plan is None), taken + (plan is not None)
                if plan is not None:
                    require_safe(plan)
    assert refused > 500 and taken > 50


@pytest.mark.parametrize("stage", PLANS)
@pytest.mark.parametrize("change", ["left out", "twice", "another's"])
def test_values_too_few_too_many_and_in_another_s_place_are_refused_or_safe(stage, change):
    content, draw, refused = PLANS[stage], random.Random(11), 0

    def made(owner, step):
        if change == "left out":
            del owner[step]
        elif change == "twice" and isinstance(owner, list):
            owner.insert(step, owner[step])
        elif change == "twice":
            owner[f"{step} "] = owner[step]
        else:
            owner[step] = owner[draw.choice(sorted(owner) if isinstance(owner, dict) else range(len(owner)))]

    for _, _, ways in chosen_places(content):
        for way in ways:
            plan = accepted(changed(content, way, made))
            refused += plan is None
            if plan is not None:
                require_safe(plan)
    assert refused > 30
