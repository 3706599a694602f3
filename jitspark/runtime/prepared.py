"""What a worker's backbone needs before its weights are loaded: plans, and the kernels that the worker will ask for.

Done first, so that what is missing ends a start in seconds. All ranks do it together: they have equal plans, or all
end with the reason of the one that has not, or all of them run stock.
"""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jitspark.building.progress import Event
from jitspark.cache.loader import Kernel
from jitspark.errors import JitsparkError, RankError, TargetError, UsageError
from jitspark.geometry import DEFAULT_GEOMETRY, Deployment, deployment
from jitspark.key import Key
from jitspark.notice import say_once
from jitspark.plans.plan import Plan, Stage
from jitspark.plans.planning import Plans, Served
from jitspark.plans.served_rows import MAX_REQUESTS, ServedRows, served_rows
from jitspark.runtime import DecodeConfig, options
from jitspark.runtime.kernel_loading import cache_layers, load_deployment
from jitspark.runtime.parts import CUTE
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.reasons import Kind, Reason, left_by, reason_of

# A cold start compiles for minutes, and another node's may be slower; a rank that dies is noticed at once.
PATIENCE = 1800.0
STEP = "plans and kernels"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The plans of a backbone by rows, and all kernels of its deployment by key."""

    deployment: Deployment
    decode: Mapping[int, Plan]
    logits: Mapping[int, Plan]
    kernels: Mapping[Key, Kernel]

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All of them, in an order that is equal on all ranks."""
        return (*self.decode.values(), *self.logits.values())

    @property
    def digest(self) -> str:
        """What must be equal on all ranks: the entries and the launches, in order."""
        told = [(plan.stage, plan.rows, [(each.name, str(each.key)) for each in plan.launches]) for plan in self.plans]
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


Tell = Callable[[Event], None]


def on_all_ranks(work: Callable[[Tell], Prepared], ranks: RankGroup, on_error: str) -> Prepared | None:
    """What `work` makes, on all ranks; None, on all of them, where one cannot and `on_error` says "stock".

    `work` is handed a function to call now and then, which ends it when another rank has already failed. Raises this
    rank's own error, or RankError with the reason of another one; RankError too, whatever `on_error` says, for a rank
    that stays silent, as nobody knows what that one does, and for an error of no known kind, which ends its rank.
    """
    patient = replace(ranks, patience=max(ranks.patience, PATIENCE))
    listening = patient.listen()
    made, error = None, None
    try:
        made = work(lambda _: _stop_with_the_others(listening.failure()))
    except JitsparkError as problem:
        error = problem
    except BaseException as problem:
        with contextlib.suppress(RankError):  # this rank's own error says more
            patient.failures(STEP, "", reason_of(problem), listening)
        raise
    digest = "" if made is None else made.digest
    failed = patient.failures(STEP, digest, None if error is None else reason_of(error), listening)
    if not failed:
        return made
    leaves = (Kind.OWN, Kind.PASSED_ON) if on_error == options.STOCK else ()
    rank, reason = left_by(failed, leaves, _refusal, rank=ranks.rank, error=error)
    say_once(f"Muse Spark runs vLLM's own decode (on_error): rank {rank}: {reason}")
    return None


def prepare(vllm_config: Any, config: DecodeConfig, target: str, tell: Tell) -> Prepared:
    """Make the plans and load, or build, the deployment's kernels.

    Raises UsageError where no plan serves a capture size, and what making plans and `load_deployment` raise.
    """
    chosen, settings = options.from_vllm_config(vllm_config), options.settings_for(vllm_config)
    served = Served(chosen.geometry or DEFAULT_GEOMETRY, config.tp, target, dict(chosen.providers))
    plans = Plans(served, cache_layers(settings))
    captured = served_rows(config.capture_sizes, config.q, vllm_config.scheduler_config.max_num_seqs)
    if not captured.rows:
        raise _nothing_served(captured, config.q)
    if (stock := captured.line()) is not None:
        say_once(stock)
    decode = {count: plans.get(served.request(Stage.DECODE, count)) for count in captured.rows}
    ours = chosen.provider("logits") == CUTE  # outside of the graph: what is stock's is simply left to it
    logits = {count: plans.get(served.request(Stage.LOGITS, count)) for count in served.logits_rows() if ours}
    made = deployment(served.geometry, config.tp)
    kernels = load_deployment(made, target, settings, served.warm_command(), tell)
    return Prepared(made, decode, logits, kernels)


def _nothing_served(captured: ServedRows, query_length: int) -> UsageError:
    """Told before weights are loaded: there would be no step to take over."""
    return UsageError(
        where="cudagraph_capture_sizes",
        found=captured.line() or "no capture sizes",
        needed=f"a decode graph that a plan serves, of {query_length} to {MAX_REQUESTS * query_length} rows",
        remedy=f"Add such sizes, multiples of {query_length}, or leave the list to vLLM.",
    )


def device_target(capability: tuple[int, int], accepted: Iterable[str]) -> str:
    """The target of this rank's device. Raises TargetError for one that the deployment does not accept."""
    found = f"sm_{capability[0]}{capability[1]}a"
    if found not in accepted:
        raise TargetError(
            where="this rank's GPU",
            found=f"compute capability {capability[0]}.{capability[1]}",
            needed=f"one of {', '.join(accepted)}",
            remedy="Run all ranks on such GPUs, or opt in to others (targets).",
        )
    return found


def _stop_with_the_others(failure: tuple[int, Reason] | None) -> None:
    if failure is not None:
        raise _refusal(*failure)


def _refusal(rank: int, reason: Reason) -> RankError:
    return RankError(
        where=f"rank {rank}",
        found=str(reason),
        needed="every rank to have its plans and kernels",
        remedy="Mend what that rank reports, and start all of them again.",
    )
