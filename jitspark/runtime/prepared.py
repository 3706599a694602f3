"""What a worker's backbone needs before its weights are loaded: plans, and the kernels that they name.

Done first, so that what is missing ends a start in seconds. All ranks do it together: they have equal plans, or all
end with the reason of the one that has not.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jitspark.backbone_plan import decode_plan, logits_plan
from jitspark.errors import TargetError
from jitspark.geometry import DEFAULT_GEOMETRY, Deployment, deployment
from jitspark.key import Key
from jitspark.loader import Kernel
from jitspark.plan import Plan
from jitspark.plan_builder import Keys
from jitspark.runtime import DecodeConfig, options
from jitspark.runtime.kernel_loading import load_kernels
from jitspark.runtime.parts import CUTE
from jitspark.runtime.ranks import RankGroup

MAX_ROWS = 64  # of a decode step, and of one launch of the logits


@dataclass(frozen=True, slots=True)
class Prepared:
    """The plans of a backbone by rows, and their kernels by key."""

    deployment: Deployment
    decode: Mapping[int, Plan]
    logits: Mapping[int, Plan]
    kernels: Mapping[Key, Kernel]


def prepare(vllm_config: Any, config: DecodeConfig, target: str, ranks: RankGroup) -> Prepared:
    """Make or read the plans, and load (or build) their kernels, on all ranks of the group.

    Raises what keeps this rank from it, or RankError with another rank's reason.
    """
    chosen = options.from_vllm_config(vllm_config)
    with ranks.together("plans"):
        name = chosen.geometry or DEFAULT_GEOMETRY
        served = deployment(name, config.tp)
        providers, keys = dict(chosen.providers), Keys(target)
        rows = decode_rows(config, vllm_config.scheduler_config.max_num_seqs)
        decode = {count: decode_plan(served, count, target, providers=providers, keys=keys) for count in rows}
        ours = chosen.provider("logits") == CUTE  # outside of the graph: what is stock's is simply left to it
        logits = {
            count: logits_plan(served, count, target, providers=providers, keys=keys)
            for count in range(1, MAX_ROWS + 1)
            if ours
        }
        plans = (*decode.values(), *logits.values())
    with ranks.together("kernels", digest(plans)):
        command = f"jitspark warm --geometry {name} --tp {config.tp} --target {target}"
        kernels = load_kernels(plans, options.settings_for(vllm_config), command)
    return Prepared(served, decode, logits, kernels)


def decode_rows(config: DecodeConfig, max_num_seqs: int) -> tuple[int, ...]:
    """The row counts of full decode graphs that vLLM may capture: its capture sizes, rounded up to whole requests."""
    rounded = {-(-size // config.q) * config.q for size in config.capture_sizes if size > 0}
    return tuple(sorted(rows for rows in rounded if rows <= min(MAX_ROWS, max_num_seqs * config.q)))


def digest(plans: Iterable[Plan]) -> str:
    """What must be equal on all ranks: the entries and the launches, in order."""
    told = [(plan.stage, plan.rows, [(launch.name, str(launch.key)) for launch in plan.launches]) for plan in plans]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


def device_target(capability: tuple[int, int], accepted: tuple[str, ...]) -> str:
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
