"""vLLM's routed experts as a plan's operations: Marlin for NVFP4, Triton for BF16, both found by import.

Our launches cut the part otherwise, so those in front of the combine only note their tensors. Marlin reads weights in
an order of its own, which has as many bytes as ours.
"""

from typing import Any

import torch
from torch import Tensor


class Experts:
    """Routed experts where their rows would be combined: both products, then the norm, the weights and the sum.

    expert_map: int32 [experts], what number each expert has here, -1 for another rank's; None where all are here.
    """

    def __init__(self, expert_map: Tensor | None = None) -> None:
        self._expert_map = expert_map
        self._hidden: Tensor | None = None
        self._gate_up: tuple[Tensor, ...] = ()
        self._down: tuple[Tensor, ...] = ()

    def norm(self, x: Tensor, *rest: Any, weighted: bool, gain_center: float, **statics: Any) -> None:
        """The Triton norm; what it writes may be the experts' input."""
        from vllm.models.muse_spark.common.ops.fused_rmsnorm import fused_rmsnorm_fwd

        assert not statics["round_input"]
        *weight, out, eps = rest
        fused_rmsnorm_fwd(x, weight[0] if weighted else None, eps, gain_center=gain_center, out=out)

    def norm_for_nvfp4(self, x: Tensor, weight: Tensor, *rest: Any, **_: Any) -> None:
        """The norm alone: Marlin takes activations in BF16."""
        from vllm.models.muse_spark.common.ops.fused_rmsnorm import fused_rmsnorm_fwd

        self._hidden = fused_rmsnorm_fwd(x, weight, rest[-1], gain_center=1.0)

    def note_nvfp4_gate_up(self, *arguments: Tensor, **_: Any) -> None:
        self._gate_up = arguments[2:5]

    def note_nvfp4_down(self, *arguments: Tensor, **_: Any) -> None:
        self._down = arguments[2:5]

    def note_bf16_gate_up(self, activation: Tensor, weight: Tensor, *_: Any, **__: Any) -> None:
        self._hidden, self._gate_up = activation, (weight,)

    def note_bf16_down(self, _: Tensor, weight: Tensor, *__: Any, **___: Any) -> None:
        self._down = (weight,)

    def run_and_exchange(self, *arguments: Any, **_: Any) -> None:
        """Whole tokens are then added up over the ranks: a copy stands in the place of that."""
        rows, topk_ids, topk_weights, weight, *_exchange, out, _rank, _timeout, eps = arguments
        combined = torch.empty_like(out)
        self.run(rows, topk_ids, topk_weights, weight, combined, eps)
        out.copy_(combined)

    def run(self, _: Tensor, *rest: Any, **__: Any) -> None:
        topk_ids, topk_weights, *_others = rest
        self.finalize(self.rows(topk_ids, topk_weights), *rest)

    def rows(self, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """A BF16 row per route; those of other ranks' experts hold anything."""
        assert self._hidden is not None
        multiply = _triton_rows if len(self._gate_up) == 1 else _rows_by_marlin
        return multiply(self._hidden, self._gate_up, self._down, topk_ids, topk_weights, self._expert_map)

    def finalize(
        self, rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, weight: Tensor, out: Tensor, eps: float
    ) -> None:
        """Norm, weights and sum of the rows that are here."""
        from vllm.models.muse_spark.common.ops.fused_finalize import fused_post_expert_finalize

        here = {} if self._expert_map is None else {"topk_ids": topk_ids, "expert_map": self._expert_map}
        fused_post_expert_finalize(rows, weight, topk_weights, eps, gain_center=1.0, weight_first=True, out=out, **here)


def _rows_by_marlin(
    hidden: Tensor,
    gate_up: tuple[Tensor, ...],
    down: tuple[Tensor, ...],
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
) -> Tensor:
    """A BF16 row per route. Codes and scales are taken for Marlin's own, which have as many bytes."""
    experts, width = len(gate_up[0]), hidden.shape[1]
    inner = down[0].shape[1] * 2 // width
    sixteenth = {"w1": (width // 16, inner * 4), "w2": (inner // 16, width * 2)}
    e4m3 = torch.float8_e4m3fn
    first = (
        gate_up[0].view(torch.int32).view(experts, *sixteenth["w1"]),
        gate_up[1].view(e4m3).view(experts, width // 16, 2 * inner),
        gate_up[2].flatten()[:experts],
    )
    second = (
        down[0].view(torch.int32).view(experts, *sixteenth["w2"]),
        down[1].view(e4m3).view(experts, inner // 16, width),
        down[2],
    )
    return marlin_rows(hidden, first, second, topk_ids, topk_weights, expert_map)


def marlin_rows(
    hidden: Tensor,
    first: tuple[Tensor, ...],
    second: tuple[Tensor, ...],
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None = None,
) -> Tensor:
    """Marlin's NVFP4 experts without weighting and summing: a BF16 row per route, its own schedule included.

    `first` and `second`: a product's codes, scales and second scales, each in Marlin's own order. `expert_map` as
    `Experts` has it.
    """
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.scalar_type import scalar_types

    made: Tensor = fused_marlin_moe(
        hidden,
        first[0],
        second[0],
        None,
        None,
        first[1],
        second[1],
        topk_weights,
        topk_ids,
        scalar_types.float4_e2m1f.id,
        global_num_experts=len(first[0]) if expert_map is None else len(expert_map),
        expert_map=expert_map,
        global_scale1=first[2],
        global_scale2=second[2],
        moe_sum=_unsummed,
        mul_topk_weights_in_gemm2=False,
    )
    return made


def _unsummed(rows: Tensor, *_: Any) -> Tensor:
    return rows


def _triton_rows(
    hidden: Tensor,
    gate_up: tuple[Tensor, ...],
    down: tuple[Tensor, ...],
    topk_ids: Tensor,
    topk_weights: Tensor,
    expert_map: Tensor | None,
) -> Tensor:
    """A BF16 row per route: each route as a token of one expert, with weight 1."""
    from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

    tokens, slots = topk_ids.shape
    routes = hidden.repeat_interleave(slots, dim=0)
    ones = torch.ones_like(topk_weights).view(-1, 1)
    held = -1 if expert_map is None else len(expert_map)
    made: Tensor = fused_experts(
        routes, gate_up[0], down[0], ones, topk_ids.view(-1, 1), global_num_experts=held, expert_map=expert_map
    )
    return made.view(tokens, slots, -1)
