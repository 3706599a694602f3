"""Decode steps that vLLM served by a captured plan, held against the plan's torch references.

For pairs whose stock decode is no oracle: on Hopper, stock multiplies NVFP4 weights by activations that it does not
quantize. What a step read is all there when its logits are computed: weights and paged caches, and vLLM's buffers at
the addresses that the graph has. From these, on caches of their own, each judged step runs again three ways:

* the kernels, each launch beside its reference from equal inputs, within the specs' own tolerances;
* their outputs beside those of the replayed graph: equal bits, so what holds for one holds for the other;
* the references alone, from embeddings to logits: how far the served step is from them in whole.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from jitspark.checking.compare import differing
from jitspark.checking.plan_compare import compare_runs
from jitspark.plans.executor import Executor
from jitspark.plans.plan import Kind, Plan
from jitspark.plans.reference_executor import ReferenceExecutor
from jitspark.runtime import backbone_tensors
from jitspark.runtime.provider_operations import provider_operations

COPY_EMBEDDINGS = ("torch", "copy_embeddings")


class StepJudge:
    """Judges steps of `runner`, vLLM's, while it is entered: up to `per_rows` of each number of rows.

    `found` has a dict for each judged step.
    """

    def __init__(self, runner: Any, per_rows: int) -> None:
        self._runner, self._per_rows = runner, per_rows
        self._decode = runner.model.specialized
        self._kernels = runner.model.prepared.kernels
        self._seen: Counter[int] = Counter()
        self._rows: int | None = None  # of the graph that was just replayed
        self._batch: tuple[Tensor, Any] | None = None
        self.found: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        runner, decode = self._runner, self._decode
        self._stepping, self._sample, self._logits = decode.stepping, runner.sample, runner.model.compute_logits
        decode.stepping, runner.sample, runner.model.compute_logits = self._begun, self._sampling, self._judging
        return self

    def __exit__(self, *_: object) -> None:
        del self._decode.stepping, self._runner.sample, self._runner.model.compute_logits

    def _begun(self, rows: int | None) -> None:
        self._rows = rows
        self._stepping(rows)

    def _sampling(self, hidden_states: Tensor, input_batch: Any, *rest: Any) -> Any:
        self._batch = (hidden_states, input_batch)
        return self._sample(hidden_states, input_batch, *rest)

    def _judging(self, hidden_states: Tensor) -> Tensor:
        logits: Tensor = self._logits(hidden_states)
        rows, batch = self._rows, self._batch
        if batch is not None and rows in self._decode._served and self._seen[rows] < self._per_rows:  # noqa: SLF001
            self._seen[rows] += 1
            self.found.append(self._judged(rows, *batch, logits))
        return logits

    def _judged(self, rows: int, served: Tensor, batch: Any, logits: Tensor) -> dict[str, Any]:
        executor = self._decode._executors[rows]  # noqa: SLF001 - a check looks where nobody else should
        embeds = self._embeddings(rows, batch)
        operations = {COPY_EMBEDDINGS: lambda _, stream: stream.copy_(embeds)}
        subject, reference, alone = (self._bound(executor, operations, kernels=each) for each in (True, False, False))
        found = launch_by_launch(subject, reference)
        real = int(batch.num_tokens)
        replayed = differing(served[:real], subject.outputs["hidden"][:real])
        alone.run()
        hidden = alone.outputs["hidden"][:real]
        wanted = self._reference_logits(hidden[batch.logits_indices])
        return {
            "rows": rows,
            "requests": int(batch.num_reqs),
            "longest": int(batch.seq_lens[: batch.num_reqs].max()),
            **found,
            "unlike_the_graph": replayed,
            "hidden_error": _relative(served[:real], hidden),
            **_logits_beside(logits, wanted),
        }

    def _embeddings(self, rows: int, batch: Any) -> Tensor:
        """What the graph read: vLLM's own buffer of embeddings, or what it makes of the token ids."""
        state = self._runner.model_state
        if state.supports_mm_inputs:
            return state.encoder_runner.inputs_embeds[:rows].clone()
        embedded: Tensor = self._runner.model.model.embed_input_ids(batch.input_ids[:rows])
        return embedded

    def _bound(self, executor: Executor, operations: dict[Any, Any], *, kernels: bool) -> Any:
        """The plan again over the same weights and inputs; caches, outputs and workspace are copies."""
        plan, tensors = executor.plan, executor.tensors
        kinds = {each.name: each.kind for each in plan.buffers}
        given = {name: each for name, each in tensors.items() if kinds[name] in (Kind.WEIGHT, Kind.INPUT)}
        given |= {name: each.clone() for name, each in tensors.items() if kinds[name] == Kind.KV_CACHE}
        device = next(iter(given.values())).device
        if not kernels or device.type == "cpu":
            return ReferenceExecutor(plan, given, device, operations=operations)
        return Executor(
            plan, self._kernels, given, device, operations={**provider_operations([plan], device), **operations}
        )

    def _reference_logits(self, hidden: Tensor) -> Tensor:
        """By the references of the logits' plan for as many rows or more."""
        model, plans = self._runner.model, self._runner.model.prepared.logits
        plan: Plan = plans[min(rows for rows in plans if rows >= len(hidden))]
        weights = backbone_tensors.weights([plan], model, model.expert_shares, 0)
        padded = torch.zeros(plan.rows, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        padded[: len(hidden)] = hidden
        executor = ReferenceExecutor(plan, {**weights, "hidden": padded}, hidden.device)
        executor.run()
        return executor.outputs["logits"][: len(hidden)]


def launch_by_launch(subject: Any, reference: Any) -> dict[str, Any]:
    """The problems that the specs' tolerances see, and by operation the worst error over what is allowed."""
    problems: list[str] = []
    margins: dict[str, float] = {}
    launches = 0
    for judged in compare_runs(subject, reference):
        launches += 1
        name = judged.launch.operation
        problems += [f"{judged.launch.name} ({name}): {text}" for text in judged.problems]
        margins[name] = max([margins.get(name, 0.0), *(each.margin for each in judged.comparisons)])
    return {"launches": launches, "problems": problems, "margins": margins}


def summary(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All judged steps in a few numbers."""
    margins: dict[str, float] = {}
    for step in found:
        for name, margin in step["margins"].items():
            margins[name] = max(margins.get(name, 0.0), margin)
    rows = sum(step["logits_rows"] for step in found)
    return {
        "steps_by_rows": dict(sorted(Counter(step["rows"] for step in found).items())),
        "launches": sum(step["launches"] for step in found),
        "problems": [text for step in found for text in step["problems"]],
        "unlike_the_graph": [step["unlike_the_graph"] for step in found if step["unlike_the_graph"]],
        "margins": {name: round(margin, 4) for name, margin in margins.items()},
        "hidden_error": max((step["hidden_error"] for step in found), default=None),
        "logits_rms": max((step["logits_rms"] for step in found), default=None),
        "logits_rms_difference": max((step["logits_rms_difference"] for step in found), default=None),
        "logits_rows": rows,
        "same_choice": sum(step["same_choice"] for step in found),
        "margin_where_another": [value for step in found for value in step["margin_where_another"]],
    }


def _logits_beside(served: Tensor, wanted: Tensor) -> dict[str, Any]:
    """Served logits beside the references' own: their distance, and whether the greedy choice is the same."""
    top = wanted.topk(2, dim=-1).values
    same = served.argmax(dim=-1) == wanted.argmax(dim=-1)
    return {
        "logits_rows": len(wanted),
        "logits_rms": float(wanted.square().mean().sqrt()),
        "logits_rms_difference": float((served - wanted).square().mean().sqrt()),
        "same_choice": int(same.sum()),
        "margin_where_another": (top[:, 0] - top[:, 1])[~same].tolist(),
    }


def _relative(found: Tensor, wanted: Tensor) -> float:
    """The largest error of a row relative to the row."""
    errors = (found.float() - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1)
    return float(errors.max())
