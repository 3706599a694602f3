"""The draft's fused forward over vLLM's draft model: its plans, bound to the loaded weights.

Serves query rows of one to eight requests with uniform queries, and as many context rows; for anything else it says
so and the caller runs stock. One executor for each number of rows; they share an arena, since they never overlap. On a
CPU the same plans run by their references.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CompilationMode
from vllm.distributed import get_tp_group
from vllm.forward_context import get_forward_context, is_forward_context_available

from jitspark.cache.loader import Kernel
from jitspark.errors import UsageError
from jitspark.geometry import Deployment
from jitspark.key import Key
from jitspark.plans.binding import Tensors, local_memory
from jitspark.plans.bound_plan import BoundPlan
from jitspark.plans.executor import Executor
from jitspark.plans.plan import Kind, Plan
from jitspark.plans.reference_executor import ReferenceExecutor
from jitspark.runtime import draft_tensors, options
from jitspark.runtime.distributed_exchanges import gathered_first
from jitspark.runtime.draft_plans import DraftPlans, make_plans
from jitspark.runtime.kernel_loading import load_kernels
from jitspark.runtime.parts import CUTE
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.symmetric_memory import ExchangeMemory, SilentRankWatch, exchange_memory
from jitspark.runtime.takeover import DecodeStep, decode_step

logger = logging.getLogger("jitspark")

Slots = Any  # a tensor for all layers, one for each (or None), or None


class DraftDecode:
    """The forward and the context store of one rank's draft.

    forward, combine, context: executors by number of rows. `model` is vLLM's inner model, whose layers hold the KV
    caches. `watch` tells of a rank that stayed silent in an exchange: here where steps run eagerly, and through
    `silence.require_all_heard` where graphs of them replay.
    """

    def __init__(
        self,
        model: Any,
        forward: Mapping[int, BoundPlan],
        combine: Mapping[int, BoundPlan],
        context: Mapping[int, BoundPlan],
        query_length: int,
        watch: SilentRankWatch | None = None,
    ) -> None:
        # not as a submodule of it, nor it of this
        self._layers = list(model.layers)
        self._names = [draft_tensors.attention(layer).layer_name for layer in self._layers]
        self._forward, self._combine, self._context = forward, combine, context
        self._query_length, self._watch = query_length, watch

    def run(self, positions: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | None:
        """Hidden states BF16 [rows, hidden] after the final norm, of embeddings `hidden`; None where stock must run.

        The result lies in memory that the next run with any number of rows overwrites. Raises RankError once an
        exchange has waited for another rank in vain.
        """
        step = self._step(len(hidden))
        if step is None or not self._cached():
            return None
        executor = self._forward[step.rows]
        _run(executor, {"inputs_embeds": hidden, "positions": positions, **self._caches(), **self._tables(step)})
        self._listen(executor.plan)
        return executor.outputs["hidden"]

    def combine(self, taps: torch.Tensor) -> torch.Tensor | None:
        """Context states BF16 [rows, hidden] of `taps` BF16 [rows, fc width], whole on every rank; None for stock.

        The result lies in memory that the next call overwrites. Raises RankError as `run`.
        """
        executor = self._combine.get(len(taps)) if taps.dim() == 2 and taps.dtype == torch.bfloat16 else None
        if executor is None or not taps.is_contiguous():
            return None
        executor.run({"taps": taps})
        self._listen(executor.plan)
        return executor.outputs["context"]

    def store_context_kv(self, states: torch.Tensor, positions: torch.Tensor, slots: Slots) -> bool:
        """Keys and values of `states` [rows, hidden] into every layer's cache; False, with nothing done, for stock.

        `slots`: int64 [rows] of each layer, or one for all; -1 is skipped. Rows that no plan serves, layers without
        slots and caches that are not allocated yet are stock's.
        """
        per_layer = [slots] * len(self._layers) if isinstance(slots, torch.Tensor) else list(slots or ())
        executor = self._context.get(len(states))
        if executor is None or not per_layer or any(each is None for each in per_layer) or not self._cached():
            return False
        named = {f"layers.{index}.slot_mapping": each for index, each in enumerate(per_layer)}
        _run(executor, {"context": states, "positions": positions, **named, **self._caches()})
        return True

    def _listen(self, plan: Plan) -> None:
        if self._watch is not None:
            self._watch.note(plan)
            self._watch.require_heard()

    def _step(self, rows: int) -> DecodeStep | None:
        """The forward under way if it is one of uniform queries, eager or under capture."""
        return decode_step(
            get_forward_context() if is_forward_context_available() else None,
            rows,
            query_length=self._query_length,
            served_rows=self._forward.keys(),
            layers=self._names,
            in_capture=lambda _: True,
        )

    def _cached(self) -> bool:
        """Whether vLLM has allocated the KV caches, in the blocks that the kernels know."""
        caches = self._caches().values()
        return all(isinstance(each, torch.Tensor) and each.dim() == 4 and each.shape[2] == 16 for each in caches)

    def _caches(self) -> dict[str, torch.Tensor]:
        return draft_tensors.kv_caches(self._layers)

    def _tables(self, step: DecodeStep) -> dict[str, torch.Tensor]:
        tables = [step.layers[name] for name in self._names]
        found = {"seq_lens": tables[0].seq_lens[: step.rows // self._query_length]}
        for index, table in enumerate(tables):
            found[f"layers.{index}.block_table"] = table.block_table
            found[f"layers.{index}.slot_mapping"] = table.slot_mapping[: step.rows]
        return found


def _run(executor: BoundPlan, inputs: Tensors) -> None:
    """Without RoPE a plan knows no positions."""
    known = executor.plan.buffer_named()
    executor.run({name: tensor for name, tensor in inputs.items() if name in known})


def build_draft_decode(model: Any, compilation_mode: Any) -> DraftDecode | None:
    """The fused forward of vLLM's draft model `model` (the inner one, with its weights loaded).

    All ranks of the TP group must call it. None, said once, where the deployment leaves a part of the draft's layers to
    stock: they are vLLM's as a whole then. Raises UsageError for a compiled model and for a config that no kernel
    serves, WeightsError for a weight that is not there, RankError with another rank's reason, and what loading kernels
    raises.
    """
    _refuse_compiled(compilation_mode)
    ranks, device = RankGroup.of_coordinator(get_tp_group()), model.fc.weight.device
    left = _left_to_stock(model.vllm_config, ranks.size)
    if left is not None:
        logger.info("The DSpark draft keeps its stock layers: %s", left)
        return None
    with ranks.together("draft plans"):
        plans = make_plans(model, device, ranks.size)
        weights = draft_tensors.weights(plans.every, model)
    with ranks.together("draft kernels"):
        kernels = _kernels(model, plans, device)
    exchanges = options.from_vllm_config(model.vllm_config).exchanges
    binder = _Binder(plans.deployment, kernels, weights, device, ranks, _exchange(plans, ranks, device, exchanges))
    with ranks.together("binding the draft's plans"):
        made = _bound(model, plans, binder)
    launches = [len(next(iter(each.values())).launches) for each in (plans.forward, plans.context)]
    logger.info("draft: %d row counts, %d launches each, %d for context rows", len(plans.forward), *launches)
    return made


def _refuse_compiled(compilation_mode: Any) -> None:
    if compilation_mode != CompilationMode.NONE:
        raise UsageError(
            where="compilation_config.mode",
            found=compilation_mode.name,
            needed="NONE: a compiled draft would trace the calls of its plans",
            remedy="Leave the mode to vLLM, or run stock (decode_backend auto).",
        )


def _left_to_stock(vllm_config: Any, tp: int) -> str | None:
    """Why the draft's layers run as vLLM's: a plan of them with another provider in a part is not made."""
    chosen = options.from_vllm_config(vllm_config)
    parts = ("boundary_norm", "projection", "attention", *(("all_reduce",) if tp > 1 else ()))
    other = next((part for part in parts if chosen.provider(part) != CUTE), None)
    return None if other is None else f"{other} is left to {chosen.provider(other)}"


def _kernels(model: Any, plans: DraftPlans, device: torch.device) -> Mapping[Key, Kernel]:
    """None on a CPU: there the references run."""
    if device.type == "cpu":
        return {}
    name, tp = plans.deployment.backbone.name, plans.deployment.tp
    command = f"jitspark warm --geometry {name} --tp {tp} --target {plans.target}"
    return load_kernels(plans.every, options.settings_for(model.vllm_config), command)


def _exchange(plans: DraftPlans, ranks: RankGroup, device: torch.device, exchanges: str) -> ExchangeMemory | None:
    """What the ranks exchange through, in the forwards and behind fc; on CPUs they send each other messages."""
    if ranks.size == 1 or device.type == "cpu":
        return None
    return exchange_memory(plans.exchanging, ranks, device, plans.deployment.backbone.tp_sizes, exchanges=exchanges)


@dataclass(frozen=True, slots=True)
class _Binder:
    """Makes executors of plans over the same weights."""

    deployment: Deployment
    kernels: Mapping[Key, Kernel]
    weights: Tensors
    device: torch.device
    ranks: RankGroup
    exchange: ExchangeMemory | None

    def bind(self, plan: Plan, arena: torch.Tensor, outputs: Tensors) -> BoundPlan:
        names = [buffer.name for buffer in plan.buffers if buffer.kind is Kind.WEIGHT]
        given: dict[str, Any] = {"arena": arena, "outputs": outputs}
        if self.exchange is not None and plan.symmetric_bytes:
            given |= {"symmetric": self.exchange.of(plan), "numbers": self.exchange.numbers}
            if self.exchange.gather is not None:
                given["instead"] = gathered_first(plan, self.deployment, self.kernels, self.exchange.gather)
        mine = {name: self.weights[name] for name in names}
        if self.device.type == "cpu":
            given |= {
                "symmetric": local_memory(plan, self.device),
                "numbers": {"rank": self.ranks.rank, "timeout_us": 0},
            }
            gather = self.ranks.gather if self.ranks.size > 1 else None
            return ReferenceExecutor(plan, mine, self.device, gather=gather, **given)
        return Executor(plan, self.kernels, mine, self.device, **given)


def _bound(model: Any, plans: DraftPlans, binder: _Binder) -> DraftDecode:
    """Everything that the plans need beside weights, caches and exchanges is allocated here."""
    draft, device = plans.deployment.draft, binder.device
    arena = torch.zeros(max(plan.workspace_bytes for plan in plans.every), dtype=torch.uint8, device=device)
    hidden, states = (
        torch.zeros(rows, draft.hidden_size, dtype=torch.bfloat16, device=device)
        for rows in (max(plans.forward), max(plans.context))
    )
    watch = None if binder.exchange is None else SilentRankWatch(plans.exchanging, binder.exchange)
    return DraftDecode(
        model,
        {rows: binder.bind(plan, arena, {"hidden": hidden[:rows]}) for rows, plan in plans.forward.items()},
        {rows: binder.bind(plan, arena, {"context": states[:rows]}) for rows, plan in plans.combine.items()},
        {rows: binder.bind(plan, arena, {}) for rows, plan in plans.context.items()},
        draft.num_speculative_tokens,
        watch,
    )
