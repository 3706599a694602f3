"""A plan that does not make sense is refused, and the problem named: made wrong on purpose, one place at a time."""

from dataclasses import replace

import pytest

from jitspark.errors import PlanError
from jitspark.geometry import deployment
from jitspark.plans.backbone import decode_plan, logits_plan
from jitspark.plans.builder import Keys
from jitspark.plans.checks import MAX_PLACED, PlanChecker
from jitspark.plans.frame_checks import order_problems
from jitspark.plans.plan import Buffer, Kind, Launch, ScalarArgument, Stage, TensorArgument, WeightSource

TARGET = "sm_90a"
KEYS = Keys(TARGET)


@pytest.fixture(scope="module")
def plan():
    return decode_plan(deployment("tiny_swa", 1), 16, TARGET, keys=KEYS)


def found_in(plan):
    return [f"{each.where}: {each.found}" for each in PlanChecker().problems(plan)]


def with_launch(plan, which, **changes):
    return replace(
        plan, launches=tuple(replace(each, **changes) if each.name == which else each for each in plan.launches)
    )


def with_buffer(plan, which, **changes):
    return replace(
        plan, buffers=tuple(replace(each, **changes) if each.name == which else each for each in plan.buffers)
    )


def with_argument(plan, launch, used, **changes):
    made = next(each for each in plan.launches if each.name == launch)
    arguments = tuple(
        replace(each, **changes) if isinstance(each, TensorArgument) and each.buffer == used else each
        for each in made.arguments
    )
    return with_launch(plan, launch, arguments=arguments)


def with_source(plan, which, **changes):
    return with_buffer(plan, which, source=replace(plan.buffer_named()[which].source, **changes))


def with_number(plan, number):
    made = next(each for each in plan.launches if each.name == "layers.0.merge")
    return with_launch(plan, "layers.0.merge", arguments=(*made.arguments, number))


def many_buffers(plan):
    """All in one place: a pair of each would have to be looked at."""
    return tuple(replace(plan.buffer_named()["branch"], name=f"branch {number}") for number in range(MAX_PLACED))


def key_of(plan, name):
    return next(each.key for each in plan.launches if each.name == name)


def without_launch(plan, name):
    return replace(plan, launches=tuple(each for each in plan.launches if each.name != name))


def moved_before(plan, name, other):
    moved = next(each for each in plan.launches if each.name == name)
    rest = without_launch(plan, name).launches
    at = next(index for index, each in enumerate(rest) if each.name == other)
    return replace(plan, launches=(*rest[:at], moved, *rest[at:]))


def on_the_place_of(plan, name, other):
    return with_buffer(plan, name, offset=plan.buffer_named()[other].offset)


BROKEN = {
    "an unknown buffer": (
        lambda plan: with_argument(plan, "layers.1.merge", "qkvg", buffer="qkv"),
        "layers.1.merge: an unknown buffer 'qkv'",
    ),
    "a read before any write": (
        lambda plan: moved_before(plan, "layers.0.attention", "layers.0.qkv_gate"),
        "layers.0.attention: qkvg read before it is written",
    ),
    "a writer that is gone": (
        lambda plan: without_launch(plan, "stream"),
        "layers.0.pre_qkv_norm: stream read before it is written",
    ),
    "an output that nobody writes": (
        lambda plan: without_launch(plan, "layers.3.post_ffn"),
        "hidden: an output that no launch writes",
    ),
    "a weight that is written": (
        lambda plan: with_argument(plan, "layers.1.o_proj", "layers.1.o_proj", role="out"),
        "layers.1.o_proj: layers.1.o_proj written",
    ),
    "an unknown role": (
        lambda plan: with_argument(plan, "layers.1.o_proj", "branch", role="update"),
        "layers.1.o_proj: role 'update'",
    ),
    "a buffer in two places of a launch that writes": (
        lambda plan: with_argument(plan, "layers.1.o_proj", "branch", buffer="attention_output"),
        "layers.1.o_proj: attention_output twice, and something written",
    ),
    "a place behind the arena": (
        lambda plan: replace(plan, workspace_bytes=plan.workspace_bytes - 256),
        "offset",
    ),
    "an arena without an end": (lambda plan: replace(plan, workspace_bytes=1 << 60), "workspace: 1152921504606846976"),
    "buffers far apart": (
        lambda plan: replace(with_buffer(plan, "branch", offset=1 << 60), workspace_bytes=(1 << 60) + (1 << 20)),
        "workspace: 1152921504607895552",
    ),
    "memory of all ranks that nobody uses": (
        lambda plan: replace(plan, symmetric_bytes=plan.symmetric_bytes + 256),
        "symmetric memory: ",
    ),
    "a place off the alignment": (
        lambda plan: with_buffer(plan, "branch", offset=plan.buffer_named()["branch"].offset + 16),
        "branch: offset",
    ),
    "a negative place": (lambda plan: with_buffer(plan, "branch", offset=-256), "branch: offset -256"),
    "one place for two that live": (
        lambda plan: on_the_place_of(plan, "stream", "qkvg"),
        "a place over",
    ),
    "a view of another size": (
        lambda plan: with_argument(plan, "layers.0.combine", "expert_rows", shape=(1, 16, 2, 255)),
        "layers.0.combine: expert_rows as [1, 16, 2, 255]",
    ),
    "a shape with nothing in it": (
        lambda plan: with_buffer(plan, "branch", shape=(16, 0)),
        "branch: shape [16, 0]",
    ),
    "an unknown dtype": (lambda plan: with_buffer(plan, "branch", dtype="float4"), "branch: dtype 'float4'"),
    "strides for other axes": (
        lambda plan: with_buffer(plan, "layers.0.kv_cache", strides=(1,)),
        "layers.0.kv_cache: 1 strides for 4 axes",
    ),
    "addresses of what no other rank maps": (
        lambda plan: with_buffer(plan, "branch", kind=Kind.PEERS, of="stream"),
        "branch: addresses of 'stream'",
    ),
    "addresses for another number of ranks": (
        lambda plan: with_buffer(plan, "branch", kind=Kind.PEERS, shape=(2,)),
        "branch: shape [2]",
    ),
    "a name twice": (lambda plan: with_buffer(plan, "branch", name="qkvg"), "buffers: a name twice"),
    "two launches of one name": (
        lambda plan: with_launch(plan, "layers.0.merge", name="layers.1.merge"),
        "launches: a name twice",
    ),
    "an output that nobody could allocate": (
        lambda plan: with_buffer(plan, "hidden", shape=(1 << 60,)),
        "memory: 230584",
    ),
    "an output of unknown size": (
        lambda plan: with_buffer(plan, "hidden", shape=("rows", 8)),
        "hidden: shape ['rows', 8]",
    ),
    "an arena and buffers without an end": (
        lambda plan: replace(with_buffer(plan, "branch", shape=(1 << 60,)), workspace_bytes=1 << 62),
        "memory: ",
    ),
    "a place in no arena": (lambda plan: with_buffer(plan, "hidden", offset=256), "memory: a place of a buffer"),
    "more buffers than are compared": (
        lambda plan: replace(plan, buffers=plan.buffers + many_buffers(plan)),
        "workspace: 1",
    ),
    "a view of two negative sizes": (
        lambda plan: with_argument(plan, "layers.0.combine", "expert_rows", shape=(-1, 16, 2, -256)),
        "layers.0.combine: expert_rows as [-1, 16, 2, -256]",
    ),
    "an unknown layout": (
        lambda plan: with_source(plan, "layers.1.o_proj", layout="upside_down"),
        "layers.1.o_proj: a weight buffer from layers.1.self_attn.o_proj.weight, upside_down, loaded",
    ),
    "an unknown tap": (
        lambda plan: with_source(plan, "layers.1.o_proj", tap="never"),
        "layers.1.o_proj: a weight buffer from layers.1.self_attn.o_proj.weight, as_is, never",
    ),
    "a source of what is no weight": (
        lambda plan: with_buffer(plan, "branch", source=WeightSource("branch")),
        "branch: a workspace buffer from branch",
    ),
    "strides below 1": (
        lambda plan: with_buffer(plan, "layers.0.kv_cache", strides=(0, -1, True, 1)),
        "layers.0.kv_cache: strides [0, -1, True, 1]",
    ),
    "strides of what is placed": (
        lambda plan: with_buffer(plan, "branch", strides=(1, 16)),
        "branch: strides of a workspace buffer",
    ),
    "addresses in a buffer that holds none": (
        lambda plan: with_buffer(plan, "branch", of="stream"),
        "branch: addresses of 'stream'",
    ),
    "a number of an unknown dtype": (
        lambda plan: with_number(plan, ScalarArgument(1.0, "float16")),
        "layers.0.merge: the number 1.0 of dtype 'float16'",
    ),
    "a number that its dtype does not hold": (
        lambda plan: with_number(plan, ScalarArgument(1 << 31, "int32")),
        "layers.0.merge: the number 2147483648 of dtype 'int32'",
    ),
    "a truth for a number": (
        lambda plan: with_number(plan, ScalarArgument(value=True, dtype="int32")),
        "layers.0.merge: the number True of dtype 'int32'",
    ),
    "no key": (lambda plan: with_launch(plan, "layers.0.o_proj", key=None), "layers.0.o_proj: provider cute, key None"),
    "another kernel's key": (
        lambda plan: with_launch(plan, "layers.0.o_proj", key=plan.keys()[0]),
        "layers.0.o_proj: key rmsnorm/",
    ),
    "another target's key": (
        lambda plan: with_launch(
            plan,
            "layers.0.o_proj",
            key=replace(key_of(plan, "layers.0.o_proj"), target="sm_100a"),
        ),
        "layers.0.o_proj: key skinny_gemm_bf16/",
    ),
    "a key of somebody else's": (
        lambda plan: with_launch(plan, "layers.0.o_proj", provider="stock"),
        "layers.0.o_proj: provider stock, key skinny_gemm_bf16/",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_wrong_is_found_and_named(plan, name):
    change, expected = BROKEN[name]

    problems = found_in(change(plan))

    assert any(expected in problem for problem in problems), problems


def test_a_good_plan_has_no_problem(plan):
    assert found_in(plan) == []
    assert found_in(logits_plan(deployment("tiny", 2), 8, TARGET, keys=KEYS)) == []


def test_the_first_problem_is_one_error_with_where_it_is(plan):
    broken = with_argument(plan, "layers.1.merge", "qkvg", buffer="qkv")

    with pytest.raises(PlanError, match=r"a file: layers\.1\.merge: found an unknown buffer 'qkv'.*jitspark warm"):
        PlanChecker().require(broken, "a file")


def test_plans_of_one_frame_are_checked_for_what_is_their_own(plan):
    checker, frame = PlanChecker(), object()
    checker.require(plan, "a file", frame)

    broken = on_the_place_of(plan, "stream", "qkvg")
    with pytest.raises(PlanError, match="a place over"):
        checker.require(broken, "another file", frame)
    with pytest.raises(PlanError, match="offset"):
        checker.require(replace(plan, workspace_bytes=0), "another file", frame)


def launch(name, *, early="", reads="", writes="", triggers_early=False, provider="cute"):
    arguments = [TensorArgument(each, "in", early=True) for each in early.split()]
    arguments += [TensorArgument(each, "in") for each in reads.split()]
    arguments += [TensorArgument(each, "out") for each in writes.split()]
    return Launch(name, "experts", provider, "norm", None, tuple(arguments), {}, triggers_early)


def order(*launches):
    named = {name: Buffer(name, Kind.WORKSPACE, (1,), "float32") for name in "abcd"}
    named["x"] = Buffer("x", Kind.INPUT, (1,), "float32")
    return [f"{each.where}: {each.found}" for each in order_problems(launches, named)]


WRITER = launch("writer", reads="x", writes="a")
NORM = launch("norm", reads="x", writes="b")
EARLY = launch("early", early="a", reads="x", writes="c")
EAGER = launch("eager", reads="x", writes="d", triggers_early=True)


def test_a_read_ahead_needs_a_launch_in_between():
    assert order(WRITER, EARLY) == ["early: a read ahead of writer, which writes it"]
    assert order(WRITER, NORM, EARLY) == []


def test_a_launch_that_lets_the_next_begin_before_it_has_waited_is_none_in_between():
    assert order(WRITER, EAGER, EARLY) == ["early: a read ahead of writer, which writes it"]
    assert order(WRITER, EAGER, EAGER, EARLY) == ["early: a read ahead of writer, which writes it"]
    assert order(WRITER, NORM, EAGER, EARLY) == []
    assert order(WRITER, EAGER, NORM, EARLY) == []


def test_what_the_launch_before_wrote_is_complete_where_it_is_waited_for():
    assert order(WRITER, launch("late", reads="a", writes="c")) == []
    assert order(launch("eager", reads="x", writes="a", triggers_early=True), launch("late", reads="a")) == []


def test_whoever_is_no_kernel_of_ours_is_no_different():
    """It ends before the next begins, but what it wrote is sure to be seen only behind a wait."""
    copy = launch("copy", reads="x", writes="a", provider="torch")

    assert order(copy, EARLY) == ["early: a read ahead of copy, which writes it"]
    assert order(copy, NORM, EARLY) == []
    assert order(WRITER, launch("copy", reads="x", writes="b", provider="torch"), EARLY) == []


def test_what_is_written_early_may_be_read_ahead_by_the_next_launch():
    def early_writer(*, triggers_early):
        made = (TensorArgument("x", "in"), TensorArgument("a", "out", early=True), TensorArgument("b", "out"))
        return replace(WRITER, arguments=made, triggers_early=triggers_early)

    other = launch("other", early="b", writes="c")

    assert order(early_writer(triggers_early=False), EARLY) == []
    assert order(early_writer(triggers_early=False), EAGER, EARLY) == []
    assert order(early_writer(triggers_early=False), other) == ["other: b read ahead of writer, which writes it"]
    assert order(early_writer(triggers_early=True), EARLY) == ["early: a read ahead of writer, which writes it"]


def test_inputs_may_be_read_ahead_by_the_first_launch():
    assert order(launch("first", early="x", writes="a")) == []


def without_early_writes(launch):
    """The same kernel, if it let the next begin before it had written what that one reads ahead."""
    late = [replace(each, early=each.early and each.role == "in") for each in launch.tensors()]
    return replace(launch, arguments=(*late, *launch.arguments[len(late) :]))


@pytest.mark.parametrize(("geometry", "tp"), [("tiny", 1), ("tiny_swa", 2), ("muse_spark_open", 8)])
def test_no_launch_of_a_decode_step_can_stand_before_the_one_that_it_reads_ahead_of(geometry, tp):
    """The made order is right: swapped with the launch before, a reader of the schedule would be too early."""
    plan = decode_plan(deployment(geometry, tp), 8, TARGET, keys=KEYS)
    assert found_in(plan) == []
    assert plan.stage is Stage.DECODE

    early = [name.name for name in plan.launches if any(each.early for each in name.tensors())]
    assert any("append" in name for name in early)
    if geometry == "muse_spark_open":
        apart = decode_plan(deployment(geometry, tp), 8, TARGET, keys=KEYS, providers={"router": "stock"})
        swapped = moved_before(apart, "layers.1.pre_expert_norm", "layers.1.routing")
        assert any("layers.1.experts.gate_up: " in problem and "ahead" in problem for problem in found_in(swapped))
        late = replace(plan, launches=tuple(map(without_early_writes, plan.launches)))
        assert any("layers.1.experts.gate_up: " in problem and "ahead" in problem for problem in found_in(late))
