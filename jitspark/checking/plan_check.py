"""A plan on a GPU: launch by launch as its references, replayed as eager, and beside another on a second stream."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jitspark.cache.loader import Kernel
from jitspark.checking.check import cuda_graph
from jitspark.checking.compare import differing
from jitspark.checking.plan_arguments import Step, Tensors, random_step, random_weights
from jitspark.checking.plan_compare import OTHER_PROVIDER, Judged, compare_runs, poison
from jitspark.key import Key
from jitspark.plans.binding import local_memory
from jitspark.plans.bound_plan import BLOCK_SIZE, Operations
from jitspark.plans.executor import Executor
from jitspark.plans.plan import Plan
from jitspark.plans.reference_executor import ReferenceExecutor

REPLAYS = 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a plan went: what was checked of it, and everything that was wrong."""

    title: str
    problems: tuple[str, ...]
    margins: Mapping[str, float] = field(default_factory=dict)  # by operation, the worst error over what is allowed

    @property
    def passed(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class Bench:
    """A plan, its kernels and what it is bound to; executors share the weights and have the rest for themselves."""

    plan: Plan
    kernels: Mapping[Key, Kernel]
    weights: Tensors
    step: Step
    device: torch.device
    numbers: Mapping[str, float | int]
    operations: Operations = field(default_factory=dict)

    @staticmethod
    def draw(
        plan: Plan,
        kernels: Mapping[Key, Kernel],
        seq_lens: Sequence[int],
        generator: torch.Generator,
        numbers: Mapping[str, float | int],
    ) -> "Bench":
        """Random weights and a step of requests of these lengths, on the generator's device."""
        weights = random_weights(plan, generator, max_positions=max(BLOCK_SIZE, *seq_lens))
        return Bench(plan, kernels, weights, random_step(plan, seq_lens, generator), generator.device, numbers)

    def executor(self) -> Executor:
        bound = {**self.weights, **_copies(self.step.inputs), **_copies(self.step.kv_caches)}
        memory = local_memory(self.plan, self.device)
        return Executor(
            self.plan, self.kernels, bound, self.device,
            operations=self.operations, numbers=self.numbers, symmetric=memory,
        )  # fmt: skip

    def reference(self, plan: Plan | None = None) -> ReferenceExecutor:
        """The plan's own references, or those of another provider's plan, whose launches may be cut otherwise."""
        plan = plan or self.plan
        bound = {**self.weights, **_copies(self.step.inputs), **_copies(self.step.kv_caches)}
        memory = local_memory(plan, self.device)
        return ReferenceExecutor(
            plan, bound, self.device, operations=self.operations, numbers=self.numbers, symmetric=memory
        )


def launch_by_launch(bench: Bench) -> Outcome:
    """Every launch against its reference, from equal inputs, in an arena of NaN."""
    executor = bench.executor()
    found = _judged("launch by launch as its references", compare_runs(executor, bench.reference()))
    wrong = [f"{name} is not finite" for name, each in executor.outputs.items() if not bool(each.isfinite().all())]
    return Outcome(found.title, (*found.problems, *wrong), found.margins)


def _judged(title: str, every: Iterator[Judged]) -> Outcome:
    problems: list[str] = []
    margins: dict[str, float] = {}
    for judged in every:
        operation = judged.launch.operation
        problems += [f"{judged.launch.name} ({operation}): {text}" for text in judged.problems]
        worst = max((each.margin for each in judged.comparisons), default=0.0)
        margins[operation] = max(margins.get(operation, 0.0), worst)
    return Outcome(title, tuple(problems), margins)


def other_provider(bench: Bench, plan: Plan, operations: Operations) -> Outcome:
    """The same step by another provider: what its launches write for others, within wider tolerances."""
    bound = {**bench.weights, **_copies(bench.step.inputs), **_copies(bench.step.kv_caches)}
    memory = local_memory(plan, bench.device)
    subject = Executor(plan, {}, bound, bench.device, operations=operations, numbers=bench.numbers, symmetric=memory)
    return _judged("another provider, launch by launch", compare_runs(subject, bench.reference(plan), OTHER_PROVIDER))


def replayed(bench: Bench) -> Outcome:
    """A captured step gives the bits of an eager one, run after run, whatever the arena held."""
    executor = bench.executor()
    eager = _run(executor, executor.run)
    replay = cuda_graph(executor.run)
    problems = [f"eager again: {text}" for text in _differences(eager, _run(executor, executor.run))]
    for number in range(3):
        problems += [f"replay {number}: {text}" for text in _differences(eager, _run(executor, replay))]
    return Outcome("captured replay equals eager, bit for bit", tuple(problems))


def quiet(bench: Bench) -> Outcome:
    """A run allocates nothing on the device and does not wait for it."""
    executor = bench.executor()
    _run(executor, executor.run)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        executor.run()
        problems = []
    except RuntimeError as problem:
        problems = [str(problem)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    problems += [f"{allocations} allocations on the device"] if allocations else []
    return Outcome("a run neither allocates nor waits", tuple(problems))


def side_by_side(first: Bench, second: Bench) -> Outcome:
    """Two executors on two streams, replayed at the same time, give what each gives alone."""
    executors = [first.executor(), second.executor()]
    alone = [_run(each, each.run) for each in executors]
    replays = [cuda_graph(each.run) for each in executors]
    for executor in executors:
        poison(executor)
    streams = [torch.cuda.Stream() for _ in executors]
    torch.cuda.synchronize()
    for _ in range(REPLAYS):
        for stream, replay in zip(streams, replays, strict=True):
            with torch.cuda.stream(stream):
                replay()
    torch.cuda.synchronize()
    problems = [
        f"executor {number}: {text}"
        for number, (executor, wanted) in enumerate(zip(executors, alone, strict=True))
        for text in _differences(wanted, _state(executor))
    ]
    return Outcome("two executors on two streams do not disturb each other", tuple(problems))


def _run(executor: Executor, run: Callable[[], object]) -> Tensors:
    poison(executor)
    for tensor in executor.outputs.values():
        tensor.zero_()
    torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    return _state(executor)


def _state(executor: Executor) -> Tensors:
    """Copies of what a step leaves behind: outputs and KV caches."""
    caches = {name: tensor for name, tensor in executor.tensors.items() if name.endswith("kv_cache")}
    return _copies({**executor.outputs, **caches})


def _copies(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _differences(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    for name, tensor in wanted.items():
        text = differing(found[name], tensor)
        if text is not None:
            yield f"{name}: {text}"
