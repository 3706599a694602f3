"""`jitspark compare`: one step run twice with random weights, and the first launch whose output leaves its tolerance.

Kernels, vLLM's operations or plain torch against the references, launch by launch from equal inputs.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cache_tools.command_line import answer, answer_json, say
from cache_tools.table import table
from jitspark.cache.loader import Loader
from jitspark.cache.lookup import Lookup
from jitspark.cli.show_plan import requested
from jitspark.errors import JitsparkError, UsageError
from jitspark.plans.binding import local_memory, title
from jitspark.plans.executor import Executor, load_kernels
from jitspark.plans.plan import Kind, Plan, Stage
from jitspark.plans.planning import Plans, Served
from jitspark.plans.weights_contract import contract, held
from jitspark.runtime.parts import PARTS, STOCK
from jitspark.settings import Settings

if TYPE_CHECKING:  # torch is imported once it is known to be there
    import torch

    from jitspark.checking.plan_compare import Judged
    from jitspark.plans.bound_plan import BoundPlan

KERNELS, TORCH = "kernels", "torch"
SUBJECTS = (KERNELS, STOCK, TORCH)
NUMBERS = {"rank": 0, "timeout_us": 1_000_000}


@dataclass(frozen=True, slots=True)
class Comparing:
    """What to compare: a step, whose operations (empty: what this machine has), and from which random numbers."""

    stage: str
    rows: int
    subject: str
    context: int
    seed: int


def compare(served: Served, chosen: Comparing, settings: Settings, *, as_json: bool) -> bool:
    """Print how each operation compares; True if all launches stay within their tolerances.

    Raises UsageError for what this machine lacks, and what making, building and binding a plan raise.
    """
    _require_torch()
    subject = _subject(chosen.subject)
    request = requested(served, chosen.stage, chosen.rows)
    if request.stage not in (Stage.DECODE, Stage.LOGITS):
        raise _usage("--stage", request.stage, "decode or logits")
    plan = Plans(served, []).make(request)
    found = list(_judged(plan, served, request, chosen, subject, settings))
    diverged = next((each for each in found if each.problems), None)
    if as_json:
        answer_json(_json(plan, subject, found))
    else:
        for line in _lines(plan, subject, found, diverged):
            answer(line)
    return diverged is None


def judged(served: Served, rows: int, context: int, settings: Settings) -> "list[Judged]":
    """How each launch of a decode step, by this machine's GPU, compares with its references.

    Raises UsageError without torch or a GPU that it can use, DeviceMemoryError for too small a one, and what
    making, building and binding a plan raise.
    """
    _require_torch()
    request = served.request(Stage.DECODE, rows)
    plan = Plans(served, []).make(request)
    chosen = Comparing(Stage.DECODE, rows, KERNELS, context, seed=0)
    return list(_judged(plan, served, request, chosen, _subject(KERNELS), settings))


def _judged(
    plan: Plan, served: Served, request: Any, chosen: Comparing, subject: str, settings: Settings
) -> "Iterator[Judged]":
    import torch

    from jitspark.checking.plan_arguments import random_step, random_weights
    from jitspark.checking.plan_compare import KERNELS as KERNEL_BOUNDS
    from jitspark.checking.plan_compare import OTHER_PROVIDER, compare_runs
    from jitspark.plans.reference_executor import ReferenceExecutor

    device = "cpu" if subject == TORCH else "cuda"
    _require_memory(plan, torch.device(device))
    generator = torch.Generator(device=device).manual_seed(chosen.seed)
    weights = random_weights(plan, generator, max_positions=max(chosen.context, plan.query_length))
    step = random_step(plan, _lengths(plan, chosen.context), generator)

    def bound(of: Plan) -> dict[str, Any]:
        given = {**step.inputs, **step.kv_caches}
        own = {name: tensor.clone() for name, tensor in given.items()}
        names = {each.name for each in of.buffers if each.kind == Kind.WEIGHT}
        return {**own, **{name: weights[name] for name in names}}

    reference = ReferenceExecutor(plan, bound(plan), device, numbers=NUMBERS, symmetric=local_memory(plan, device))
    runs: dict[str, Callable[[], BoundPlan]] = {
        KERNELS: lambda: _kernels(plan, bound(plan), settings),
        STOCK: lambda: _stock(Plans(_all_stock(served), []).make(request_for(_all_stock(served), request)), bound),
        TORCH: lambda: _torch(plan, bound(plan)),
    }
    return compare_runs(runs[subject](), reference, OTHER_PROVIDER if subject == STOCK else KERNEL_BOUNDS)


def _require_memory(plan: Plan, device: "torch.device") -> None:
    """Raise DeviceMemoryError where the plan's weights alone are more than is free: 66 GB for a whole rank at TP 8."""
    from jitspark.runtime import device_memory

    both = held(contract([plan]))
    remedy = "Compare a geometry with fewer layers (--geometry FILE), or use a device with more memory."
    needed, free = both.shared + both.twice, device_memory.free_bytes(device)
    device_memory.check(f"random weights of a {title(plan)}", device, needed, free, remedy)


def request_for(served: Served, like: Any) -> Any:
    """The request of a deployment with other providers for the same step."""
    return served.request(like.stage, like.rows)


def _all_stock(served: Served) -> Served:
    return Served(served.geometry, served.tp, served.target, dict.fromkeys(PARTS, STOCK))


def _kernels(plan: Plan, tensors: dict[str, Any], settings: Settings) -> "BoundPlan":
    kernels = load_kernels([plan], Lookup(settings), Loader(settings), settings)
    return Executor(plan, kernels, tensors, "cuda", numbers=NUMBERS, symmetric=local_memory(plan, "cuda"))


def _stock(plan: Plan, bound: Callable[[Plan], dict[str, Any]]) -> "BoundPlan":
    from jitspark.runtime.stock_ops import stock_operations

    return Executor(
        plan, {}, bound(plan), "cuda",
        operations=stock_operations(), numbers=NUMBERS, symmetric=local_memory(plan, "cuda"),
    )  # fmt: skip


def _torch(plan: Plan, tensors: dict[str, Any]) -> "BoundPlan":
    from jitspark.checking.torch_kernels import TORCH_KERNELS
    from jitspark.plans.reference_executor import ReferenceExecutor

    return ReferenceExecutor(plan, tensors, instead=TORCH_KERNELS, numbers=NUMBERS, symmetric=local_memory(plan, "cpu"))


def _lengths(plan: Plan, context: int) -> list[int]:
    """Requests of different lengths up to `context`, every third one padded."""
    length = plan.query_length
    count = plan.rows // length
    return [0 if i % 3 == 1 else max(length, context - 13 * i) for i in range(count)]


def _subject(asked: str) -> str:
    """What is held against the references. Raises UsageError for what this machine cannot run."""
    import torch

    gpu = bool(torch.cuda.is_available())
    if asked not in ("", *SUBJECTS):
        raise _usage("--subject", asked, f"one of {', '.join(SUBJECTS)}")
    if asked in (KERNELS, STOCK) and not gpu:
        raise _usage("--subject", f"{asked}, and no GPU that torch can use", f"a GPU, or --subject {TORCH}")
    if asked == STOCK and importlib.util.find_spec("vllm") is None:
        raise _usage("--subject", f"{asked}, and no vLLM", "an environment with vLLM")
    if not asked and not gpu:
        say(f"no GPU that torch can use: plain torch ({TORCH}) is compared with the references, on the CPU")
    return asked or (KERNELS if gpu else TORCH)


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            where="compare",
            found="no torch in this environment",
            needed="torch, which references are written in",
            remedy="Install torch, or run it in vLLM's environment.",
        )


def _lines(plan: Plan, subject: str, found: "Sequence[Judged]", diverged: "Judged | None") -> Iterator[str]:
    rows = [(name, str(count), f"{margin:.3f}") for name, count, margin in _by_operation(found)]
    yield f"{title(plan)}: {subject} against references"
    yield from table(("operation", "launches", "worst margin"), rows)
    if diverged is None:
        yield f"all {len(found)} launches are within their tolerances"
    else:
        yield f"first divergence: {diverged.launch.name} ({diverged.launch.operation})"
        yield from (f"  {text}" for text in diverged.problems)


def _by_operation(found: "Sequence[Judged]") -> list[tuple[str, int, float]]:
    """(operation, launches, the largest error over what is allowed), in the order of the step."""
    margins: dict[str, list[float]] = {}
    for each in found:
        worst = max((one.margin for one in each.comparisons), default=0.0)
        margins.setdefault(each.launch.operation, []).append(worst)
    return [(name, len(values), max(values)) for name, values in margins.items()]


def _json(plan: Plan, subject: str, found: "Sequence[Judged]") -> dict[str, Any]:
    diverged = [each for each in found if each.problems]
    return {
        "plan": title(plan),
        "subject": subject,
        "operations": [
            {"operation": name, "launches": count, "worst_margin": margin if math.isfinite(margin) else None}
            for name, count, margin in _by_operation(found)
        ],
        "diverged": [
            {"launch": each.launch.name, "operation": each.launch.operation, "problems": list(each.problems)}
            for each in diverged
        ],
    }


def _usage(where: str, found: str, needed: str) -> JitsparkError:
    return UsageError(where=where, found=found, needed=needed, remedy="Correct it, or run this where it is there.")
