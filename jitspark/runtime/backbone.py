"""The backbone's decode: its plans bound to vLLM's weights and caches, and the steps that they take over.

One executor for each number of rows; they share an arena and the memory of their outputs, since steps never overlap.
What a captured graph replays needs nothing from here. On a CPU the same plans run by their references. Refuses, when
it is bound, what a config could not show.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jitspark.errors import UsageError
from jitspark.plans.bound_plan import BoundPlan
from jitspark.plans.executor import Executor
from jitspark.plans.plan import Kind, Plan
from jitspark.plans.reference_executor import ReferenceExecutor
from jitspark.runtime import backbone_tensors
from jitspark.runtime.activity import StepCounter
from jitspark.runtime.distributed_exchanges import gathered_first
from jitspark.runtime.expert_tp import ExpertShares
from jitspark.runtime.logits import Logits
from jitspark.runtime.prepared import Prepared
from jitspark.runtime.provider_operations import provider_operations
from jitspark.runtime.providers import ATTENTION_BACKENDS
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.silence import require_all_heard
from jitspark.runtime.symmetric_memory import ExchangeMemory, SilentRankWatch
from jitspark.runtime.takeover import DecodeStep, decode_step

logger = logging.getLogger("jitspark")


class BackboneDecode:
    """The decode of one rank. `model` is vLLM's top-level class, loaded; `shares` its experts, taken."""

    def __init__(
        self,
        model: Any,
        prepared: Prepared,
        shares: ExpertShares | None,
        device: torch.device,
        *,
        max_model_len: int,
        ranks: RankGroup,
        exchanges: ExchangeMemory | None = None,
    ) -> None:
        self._model, self._device, self._ranks = model, device, ranks
        self._layers = {backbone_tensors.attention(layer).layer_name: index for index, layer in _layers(model)}
        self._query_length = prepared.deployment.query_length
        self._taps = [f"taps.{layer}" for layer in prepared.deployment.backbone.tap_layers]
        _check_attention(model, device)
        _check_taps(model, prepared)
        _check_positions(model, max_model_len)
        self._embeddings: torch.Tensor | None = None
        self._capture: Any = None
        self._captured: set[int] = set()
        self._served: frozenset[int] = frozenset()  # rows whose graphs run plans
        self._counter = StepCounter()
        self._watch = None if exchanges is None else SilentRankWatch(prepared.plans, exchanges)
        freed = backbone_tensors.share_rope_tables(model)
        weights = backbone_tensors.weights(prepared.plans, model, shares, ranks.rank)
        binder = _Binder(prepared, weights, device, exchanges, self._copy_embeddings)
        outputs = _Outputs(prepared.decode, device)
        self._executors = {rows: binder.bind(plan, outputs.of(plan)) for rows, plan in prepared.decode.items()}
        # stands for the embeddings in a step that gets token ids: those are embedded where they are copied
        self._no_embeddings = torch.zeros(
            max(self._executors), prepared.deployment.backbone.hidden_size, dtype=torch.bfloat16, device=device
        )
        self._logits = Logits(prepared.logits, binder.bind, device, self._note) if prepared.logits else None
        logger.debug("decode: one RoPE table instead of one a layer frees %.1f GB", freed / 1e9)

    def require_graphs(self, mode: Any) -> None:
        """`mode`: the graphs that vLLM has settled on, now that it knows what its attention backends can.

        Raises UsageError for one without full graphs of decode steps: then nothing might be captured at all, and nobody
        would say so later.
        """
        if mode is None or mode.decode_mode().name != "FULL":
            raise self._without_graphs(f"cudagraph_mode {getattr(mode, 'name', None)}, as vLLM has settled on")

    def bind_kv_caches(self) -> None:
        """Bind what vLLM's attention layers hold now."""
        caches = backbone_tensors.kv_caches(self._model)
        for executor in self._executors.values():
            executor.bind_kv_caches(caches)

    def capturing(self, metadata: Any) -> None:
        """This attention metadata was made for a capture: it is known again in `step`."""
        self._capture = metadata

    def stepping(self, graph_rows: int | None) -> None:
        """A step of the server begins, by a full graph of `graph_rows` rows or by none.

        Raises RankError where a kernel of an earlier step waited in vain, be it the backbone's or the draft's: graphs
        replay without anybody else to say so.
        """
        require_all_heard()
        self._counter.note(planned=graph_rows in self._served)

    def step(self, context: Any, rows: int) -> DecodeStep | None:
        """The step that a forward with this context is, if a full graph of it is being captured; else None.

        In the eager run before the capture ranks tell each other what they make of it, since those that launch an
        exchange would wait for the others. Raises RankError where they differ.
        """
        step = decode_step(
            context,
            rows,
            query_length=self._query_length,
            served_rows=self._executors.keys(),
            layers=self._layers.keys(),
            in_capture=self._in_capture,
        )
        # the schedule of the experts leaves padding out
        known = step is not None and step.is_padding is not None and len(step.is_padding) == rows
        captured_next = context is not None and self._in_capture(context.attn_metadata) and not _being_captured()
        if rows in self._executors and captured_next:
            with self._ranks.together(f"a decode step of {rows} rows", "run by a plan" if known else "run by vLLM"):
                pass
        return step if known else None

    def run(
        self,
        step: DecodeStep,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None,
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Launch the step: hidden states BF16 [rows, hidden], and the taps FP32 [rows, hidden] by layer."""
        executor = self._executors[step.rows]
        # vLLM's own embedding keeps FP32 where it is called by the text model, and BF16 in its buffer of embeddings
        self._embeddings = self._model.model.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        executor.run({**self._common(step, positions), **self._tables(step)})
        self._embeddings = None
        self._note(executor.plan)
        outputs = executor.outputs
        if _being_captured():
            self._captured.add(step.rows)
        return outputs["hidden"], [outputs[name] for name in self._taps]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """FP32 logits [rows, vocab] of the final norm's output, None for more rows than one launch serves."""
        return None if self._logits is None else self._logits(hidden_states)

    @property
    def captured_rows(self) -> tuple[int, ...]:
        """Of the graphs that have been captured through a plan, until `captured` is called."""
        return tuple(sorted(self._captured))

    def captured(self) -> None:
        """The backbone's graphs are captured. Raises UsageError where none of them runs a plan."""
        self._capture = None
        self._served, self._captured = frozenset(self._captured), set()
        rows = sorted(self._served)
        if not rows:
            raise self._without_graphs("none that a plan serves")
        counts = sorted({len(self._executors[each].plan.launches) for each in rows})
        launches = " or ".join(map(str, counts))
        logger.info("decode: %d full graphs run plans (%s rows), %s launches each", len(rows), _listed(rows), launches)

    def _without_graphs(self, found: str) -> UsageError:
        return UsageError(
            where="CUDA graphs of the decode step",
            found=found,
            needed=f"full graphs of uniform decode steps of {min(self._executors)} to {max(self._executors)} rows",
            remedy="Use --compilation-config with cudagraph_mode FULL_DECODE_ONLY or FULL_AND_PIECEWISE, and an "
            "attention backend that supports it: FLASH_ATTN, or FLASHINFER where it finds its trtllm-gen kernels "
            "(flashinfer-cubin, or a network when vLLM starts).",
        )

    def _in_capture(self, metadata: Any) -> bool:
        return self._capture is not None and metadata is self._capture

    def _note(self, plan: Plan) -> None:
        if self._watch is not None:
            self._watch.note(plan)

    def _common(self, step: DecodeStep, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        tables = next(iter(step.layers.values()))
        return {
            "inputs_embeds": self._no_embeddings[: step.rows],
            "positions": positions,
            "is_padding": step.is_padding.view(torch.uint8),
            "seq_lens": tables.seq_lens,
        }

    def _tables(self, step: DecodeStep) -> dict[str, torch.Tensor]:
        found = {}
        for name, tables in step.layers.items():
            found[f"layers.{self._layers[name]}.block_table"] = tables.block_table
            found[f"layers.{self._layers[name]}.slot_mapping"] = tables.slot_mapping
        return found

    def _copy_embeddings(self, _: torch.Tensor, stream: torch.Tensor) -> None:
        assert self._embeddings is not None, "only within `run`"
        stream.copy_(self._embeddings)


class _Binder:
    """Makes executors of plans over the same weights, in one arena."""

    def __init__(
        self,
        prepared: Prepared,
        weights: Mapping[str, torch.Tensor],
        device: torch.device,
        exchanges: ExchangeMemory | None,
        copy_embeddings: Callable[..., None],
    ) -> None:
        self._prepared, self._weights, self._device, self._exchanges = prepared, weights, device, exchanges
        self._copy_embeddings = copy_embeddings
        size = max(plan.workspace_bytes for plan in prepared.plans)
        self._arena = torch.zeros(size, dtype=torch.uint8, device=device)

    def bind(self, plan: Plan, outputs: Mapping[str, torch.Tensor]) -> BoundPlan:
        """`outputs`: tensors by buffer name, inputs among them if they are to stay."""
        names = [buffer.name for buffer in plan.buffers if buffer.kind is Kind.WEIGHT]
        weights = {name: self._weights[name] for name in names}
        given: dict[str, Any] = {"arena": self._arena, "outputs": outputs}
        gather = None
        if self._exchanges is not None and plan.symmetric_bytes:
            gather = self._exchanges.gather
            given |= {"symmetric": self._exchanges.of(plan), "numbers": self._exchanges.numbers}
        operations: dict[tuple[str, str], Callable[..., object]] = {("torch", "copy_embeddings"): self._copy_embeddings}
        if self._device.type == "cpu":
            return ReferenceExecutor(plan, weights, self._device, operations=operations, gather=gather, **given)
        operations = {**provider_operations([plan], self._device), **operations}
        kernels = self._prepared.kernels
        if gather is not None:
            given["instead"] = gathered_first(plan, self._prepared.deployment, kernels, gather)
        return Executor(plan, kernels, weights, self._device, operations=operations, **given)


class _Outputs:
    """Memory for the outputs of all row counts: each has the first rows of the largest's."""

    def __init__(self, plans: Mapping[int, Plan], device: torch.device) -> None:
        largest = plans[max(plans)]
        buffers = [buffer for buffer in largest.buffers if buffer.kind is Kind.OUTPUT]
        self._memory = {
            each.name: torch.zeros(*each.shape, dtype=getattr(torch, each.dtype), device=device) for each in buffers
        }

    def of(self, plan: Plan) -> dict[str, torch.Tensor]:
        return {name: memory[: plan.rows] for name, memory in self._memory.items()}


def _being_captured() -> bool:
    return torch.cuda.is_available() and bool(torch.cuda.is_current_stream_capturing())


def _layers(model: Any) -> list[tuple[int, Any]]:
    return list(enumerate(model.model.layers))


def _check_attention(model: Any, device: torch.device) -> None:
    """The backend that vLLM has chosen where none is named: the config does not show it."""
    names = {backbone_tensors.attention(layer).attn_backend.get_name() for _, layer in _layers(model)}
    other = sorted(names - set(ATTENTION_BACKENDS))
    if other and device.type != "cpu":  # there the references read what a test gives them
        raise UsageError(
            where="the attention backend",
            found=f"{', '.join(other)}, as vLLM has chosen",
            needed=f"{' or '.join(ATTENTION_BACKENDS)} in every layer",
            remedy="Name one of them (--attention-backend), or run stock (decode_backend auto).",
        )


def _check_taps(model: Any, prepared: Prepared) -> None:
    """What the draft reads must be what the plans write: vLLM counts from the state before the first layer."""
    found = tuple(getattr(model.model, "aux_hidden_state_layers", ()))
    needed = tuple(layer + 1 for layer in prepared.deployment.backbone.tap_layers)
    if found != needed:
        raise UsageError(
            where="the draft's target_layer_ids",
            found=f"hidden states after layers {', '.join(map(str, found)) or 'none'}",
            needed=f"those after layers {', '.join(map(str, needed))}, as the geometry says",
            remedy="Use the draft that belongs to this backbone, or a geometry that names its taps.",
        )


def _check_positions(model: Any, max_model_len: int) -> None:
    """A kernel reads a row of the RoPE table for each position. The block tables are vLLM's own for this length."""
    tables = [getattr(layer.self_attn, "rotary_emb", None) for layer in model.model.layers]
    rows = min((len(table.cos_sin_cache) for table in tables if table is not None), default=max_model_len)
    if rows < max_model_len:
        raise UsageError(
            where="max_model_len",
            found=f"{max_model_len}, and RoPE tables of {rows} positions",
            needed="a table row for each position",
            remedy=f"Lower max_model_len to {rows}.",
        )


def _listed(rows: list[int]) -> str:
    return ", ".join(map(str, rows))
