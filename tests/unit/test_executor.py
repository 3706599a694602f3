"""The executor without a GPU: what it refuses, what it loads, and that a run is nothing but its launches."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from jitspark.cache.loader import Loader  # noqa: E402
from jitspark.cache.lookup import Lookup  # noqa: E402
from jitspark.checking.plan_arguments import random_step, random_weights  # noqa: E402
from jitspark.checking.plan_compare import first_divergence  # noqa: E402
from jitspark.errors import BindingError, MissingEntriesError, TargetError  # noqa: E402
from jitspark.geometry import deployment  # noqa: E402
from jitspark.plans.backbone import decode_plan  # noqa: E402
from jitspark.plans.binding import local_memory  # noqa: E402
from jitspark.plans.executor import Executor, load_kernels  # noqa: E402
from jitspark.plans.plan import TensorArgument  # noqa: E402
from jitspark.plans.reference_executor import ReferenceExecutor, reference_call  # noqa: E402
from jitspark.runtime.parts import PARTS  # noqa: E402
from jitspark.settings import from_environment  # noqa: E402

TARGET = "sm_90a"
NUMBERS = {"rank": 0, "timeout_us": 1}


def plan_of(name="tiny_swa", tp=1, rows=16, provider=None):
    providers = dict.fromkeys(PARTS, provider) if provider else None
    return decode_plan(deployment(name, tp), rows, TARGET, providers=providers)


def tensors_for(plan, lengths=(40, 0), seed=3):
    generator = torch.Generator().manual_seed(seed)
    step = random_step(plan, lengths, generator)
    return {**random_weights(plan, generator), **step.inputs, **step.kv_caches}


def references_as(provider, plan):
    """Another provider's operations that are the references, and a list of the operations that were launched."""
    launched = []

    def counted(name, call):
        def run(*arguments, **_):
            launched.append(name)
            call(*arguments)

        return run

    calls = {each.name: reference_call(plan, each, {}) for each in plan.launches}
    by_operation = {}
    for launch in plan.launches:
        if launch.provider == provider:
            by_operation.setdefault(launch.operation, []).append(calls[launch.name])

    def turns(name, found):
        state = {"next": 0}

        def run(*arguments):
            found[state["next"] % len(found)](*arguments)
            state["next"] += 1

        return counted(name, run)

    return {(provider, name): turns(name, found) for name, found in by_operation.items()}, launched


def test_a_plan_of_another_target_than_the_device_s_is_refused():
    plan = plan_of()
    keys = plan.keys()
    kernels = {key: FakeKernel(key) for key in keys}

    with pytest.raises(TargetError) as caught:
        Executor(plan, kernels, {}, "cpu")

    assert TARGET in caught.value.found


class FakeKernel:
    """An entry whose record says that the kernel takes no arguments at all."""

    def __init__(self, key):
        spec = {"args": [], "constraints": []}
        recipe = {"spec": spec, "axes": {}, "statics": {}, "dtypes": {}}
        self.entry = type(
            "Entry", (), {"key": key, "record": type("Record", (), {"recipe": recipe, "kernel": key.kernel})}
        )
        self.function = None


def test_a_kernel_that_was_not_loaded_is_named_before_anything_is_bound():
    plan = plan_of()

    with pytest.raises(MissingEntriesError) as caught:
        Executor(plan, {}, {}, "cpu")

    assert "layers.0.pre_qkv_norm" in caught.value.where
    assert caught.value.keys == (str(plan.launches[1].key),)


def test_an_operation_that_no_provider_has_is_named():
    with pytest.raises(BindingError) as caught:
        Executor(plan_of(provider="stock"), {}, {}, "cpu")

    assert "layers.0.pre_qkv_norm" in caught.value.where
    assert caught.value.found == "no operation rmsnorm of provider stock"


def test_a_run_launches_the_plan_in_order_with_the_tensors_that_were_bound():
    plan = plan_of(provider="stock")
    operations, launched = references_as("stock", plan)
    executor = Executor(plan, {}, tensors_for(plan), "cpu", operations=operations)
    seen = []

    executor.run(after=lambda launch, arguments: seen.append((launch.name, [id(each) for each in arguments])))
    executor.run(after=lambda launch, arguments: seen.append((launch.name, [id(each) for each in arguments])))

    assert launched == [each.operation for each in plan.launches if each.provider == "stock"] * 2
    assert seen[: len(plan.launches)] == seen[len(plan.launches) :]
    assert bool(executor.outputs["hidden"].isfinite().all())
    assert executor.report.workspace_bytes == plan.workspace_bytes


def test_nothing_is_launched_while_a_tensor_is_missing_or_does_not_fit():
    plan = plan_of(provider="stock")
    operations, launched = references_as("stock", plan)
    tensors = tensors_for(plan)
    embeds = tensors.pop("inputs_embeds")
    executor = Executor(plan, {}, tensors, "cpu", operations=operations)

    for run in (executor.run, lambda: executor.run({"inputs_embeds": embeds[:8].contiguous()})):
        with pytest.raises(BindingError, match="inputs_embeds"):
            run()

    assert launched == []
    executor.run({"inputs_embeds": embeds})
    assert launched


def test_a_context_that_tables_cannot_hold_is_refused():
    plan = plan_of()
    tensors = tensors_for(plan)
    short = {"rope.cos_sin": tensors["rope.cos_sin"][:47].contiguous()}

    ReferenceExecutor(plan, tensors, max_context=48)
    with pytest.raises(BindingError, match="max_positions = 47"):
        ReferenceExecutor(plan, {**tensors, **short}, max_context=48)
    with pytest.raises(BindingError, match=r"max_blocks = 3, enough for 48 tokens .* room for 49 tokens"):
        ReferenceExecutor(plan, tensors, max_context=49)


def test_tables_that_were_refused_are_not_what_runs():
    plan = plan_of()
    tensors = tensors_for(plan)
    executor = ReferenceExecutor(plan, tensors, max_context=48)
    short = {"layers.0.block_table": tensors["layers.0.block_table"][:, :2]}

    for _ in range(2):  # the second time it must not be taken for what is bound already
        with pytest.raises(BindingError, match="max_blocks = 2"):
            executor.run(short)

    assert executor.tensors["layers.0.block_table"] is tensors["layers.0.block_table"]


def test_two_executors_may_share_an_arena_when_they_take_turns():
    plan = plan_of()
    arena = torch.zeros(plan.workspace_bytes, dtype=torch.uint8)
    first, second = (ReferenceExecutor(plan, tensors_for(plan, seed=seed), arena=arena) for seed in (1, 2))
    alone = ReferenceExecutor(plan, tensors_for(plan, seed=1))

    second.run()
    first.run()
    alone.run()

    assert first.outputs["hidden"].equal(alone.outputs["hidden"])


def test_a_reference_that_errs_is_the_first_divergence():
    plan = plan_of("tiny", tp=2)
    tensors = tensors_for(plan)

    def made(**options):
        own = {name: tensor.clone() for name, tensor in tensors.items()}
        return ReferenceExecutor(plan, own, numbers=NUMBERS, symmetric=local_memory(plan, "cpu"), **options)

    def off_by_one_percent(activation, router, pooler, logits, pooled, **_):
        logits.copy_(1.01 * activation.double() @ router.double().T)
        pooled.copy_(activation.double() @ pooler.double().T)

    assert first_divergence(made(), made()) is None
    judged = first_divergence(made(instead={"router_pooler_gemm": off_by_one_percent}), made())
    assert judged.launch.name == "layers.0.router_pooler"
    assert judged.problems


def test_missing_entries_are_named_where_compiling_is_forbidden(tmp_path):
    plan = plan_of(rows=8)
    settings = replace(from_environment(), cache_dir=tmp_path, cache_path=(), compile="never")

    with pytest.raises(MissingEntriesError) as caught:
        load_kernels([plan], Lookup(settings), Loader(settings), settings)

    assert len(caught.value.keys) == len(plan.keys())


def test_a_plan_made_from_other_sources_is_said_to_be_one(tmp_path):
    plan = plan_of(rows=8)
    launch = plan.launches[1]
    foreign = replace(launch, key=replace(launch.key, recipe="0" * 64))
    settings = replace(from_environment(), cache_dir=tmp_path, cache_path=(), compile="never")

    with pytest.raises(MissingEntriesError) as caught:
        load_kernels([replace(plan, launches=(foreign,))], Lookup(settings), Loader(settings), settings)

    assert caught.value.keys == (str(foreign.key),)
    assert "other sources" in caught.value.remedy


def test_every_argument_of_a_launch_has_the_name_that_its_operation_gives_it():
    from jitspark.plans.reference_executor import argument_names

    for launch in plan_of("tiny_swa", tp=2).launches:
        assert len(argument_names(launch)) == len(launch.arguments)
        assert all(
            isinstance(each, TensorArgument) or name
            for each, name in zip(launch.arguments, argument_names(launch), strict=True)
        )
