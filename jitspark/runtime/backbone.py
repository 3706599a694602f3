"""The backbone's decode: its plans bound to vLLM's weights and caches, and the steps that they take over.

One executor for each number of rows; they share an arena and the memory of their outputs, since steps never overlap.
What a captured graph replays needs nothing from here. On a CPU the same plans run by their references. Refuses, when
it is bound, what a config could not show.
"""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from jitspark.bound_plan import BoundPlan
from jitspark.errors import UsageError
from jitspark.executor import Executor
from jitspark.plan import Kind, Plan
from jitspark.reference_executor import ReferenceExecutor
from jitspark.runtime import backbone_tensors
from jitspark.runtime.expert_tp import ExpertShares
from jitspark.runtime.logits import Logits
from jitspark.runtime.prepared import Prepared
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
        rank: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._layers = {backbone_tensors.attention(layer).layer_name: index for index, layer in _layers(model)}
        self._query_length = prepared.deployment.query_length
        self._embeddings: torch.Tensor | None = None
        self._capture: Any = None
        self.captured_rows: list[int] = []
        plans = prepared.decode
        every = (*plans.values(), *prepared.logits.values())
        self._weights = backbone_tensors.weights(every, model, shares, rank)
        size = max(plan.workspace_bytes for plan in every)
        self._bind: dict[str, Any] = {
            "operations": {("torch", "copy_embeddings"): self._copy_embeddings},
            "numbers": {"rank": rank},
            "arena": torch.zeros(size, dtype=torch.uint8, device=device),
        }
        self._kernels, self._device = prepared.kernels, device
        memory = _Outputs(plans, device)
        self._executors = {
            rows: self._bound(plan, memory.of(plan), max_context=max_model_len) for rows, plan in plans.items()
        }
        self._taps = [f"taps.{layer}" for layer in prepared.deployment.backbone.tap_layers]
        # stands for the embeddings in a step that gets token ids: those are embedded where they are copied
        self._no_embeddings = torch.zeros(
            max(plans), prepared.deployment.backbone.hidden_size, dtype=torch.bfloat16, device=device
        )
        self._logits = Logits(prepared.logits, self._bound, device) if prepared.logits else None

    def bind_kv_caches(self) -> None:
        """Bind what vLLM's attention layers hold now."""
        caches = backbone_tensors.kv_caches(self._model)
        for executor in self._executors.values():
            executor.bind_kv_caches(caches)

    def prepared(self, metadata: Any, *, for_capture: bool) -> None:
        """Note attention metadata that vLLM made: what is made for a capture is known again in `step`."""
        if for_capture:
            self._capture = metadata

    def step(self, context: Any, rows: int) -> DecodeStep | None:
        """The step that a forward with this context is, if a full graph of it is being captured; else None."""
        step = decode_step(
            context,
            rows,
            query_length=self._query_length,
            served_rows=self._executors.keys(),
            layers=self._layers.keys(),
            in_capture=lambda metadata: metadata is self._capture,
        )
        # the schedule of the experts leaves padding out
        known = step is not None and step.is_padding is not None and len(step.is_padding) == rows
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
        outputs = executor.outputs
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            self.captured_rows.append(step.rows)
        return outputs["hidden"], [outputs[name] for name in self._taps]

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """FP32 logits [rows, vocab] of the final norm's output, None for more rows than one launch serves."""
        return None if self._logits is None else self._logits(hidden_states)

    def captured(self) -> None:
        """The backbone's graphs are captured. Raises UsageError where none of them runs a plan."""
        self._capture = None
        rows, self.captured_rows = sorted(set(self.captured_rows)), []
        if not rows:
            raise UsageError(
                where="CUDA graphs of the decode step",
                found="none that a plan serves",
                needed=f"full graphs of uniform decode steps of {min(self._executors)} to {max(self._executors)} rows",
                remedy="Use --compilation-config with cudagraph_mode FULL_DECODE_ONLY or FULL_AND_PIECEWISE, and an "
                "attention backend that supports it.",
            )
        launches = len(self._executors[rows[0]].plan.launches)
        logger.info("decode: %d full graphs run plans (%s rows), %d launches each", len(rows), _listed(rows), launches)

    def _bound(self, plan: Plan, tensors: Mapping[str, torch.Tensor], *, max_context: int | None = None) -> BoundPlan:
        weights = {name: self._weights[name] for name in _names(plan, Kind.WEIGHT)}
        given: dict[str, Any] = {**self._bind, "outputs": tensors, "max_context": max_context}
        if self._device.type == "cpu":
            return ReferenceExecutor(plan, weights, self._device, **given)
        return Executor(plan, self._kernels, weights, self._device, **given)

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


def _layers(model: Any) -> list[tuple[int, Any]]:
    return list(enumerate(model.model.layers))


def _names(plan: Plan, kind: Kind) -> list[str]:
    return [buffer.name for buffer in plan.buffers if buffer.kind is kind]


def _listed(rows: list[int]) -> str:
    return ", ".join(map(str, rows))
