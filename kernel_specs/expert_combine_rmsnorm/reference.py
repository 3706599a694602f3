"""What `expert_combine_rmsnorm` computes, in float64, rounded once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives.rows_reference import repeated, rms_normed

ROW_SCALES = (1.0, 1e15, 1e-3, 0.0, 30.0, 1e-18, 1.0)
TOKEN_SPAN = 5  # every fifth token has no expert at all


def expert_combine_rmsnorm(
    rows: Tensor, topk_ids: Tensor, topk_weights: Tensor, weight: Tensor, out: Tensor, eps: float, **_: int
) -> None:
    """Writes `out`. Rows of ids -1 count as zeros, whatever they hold."""
    absent = topk_ids < 0
    whole = rows.double().sum(dim=0).masked_fill(absent[..., None], 0.0)
    normed = rms_normed(whole * (weight.double() + 1.0), eps)
    weights = topk_weights.double().masked_fill(absent, 0.0)
    out.copy_((weights[..., None] * normed).sum(dim=1))


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Rows of very different size; ids -1 here and there and for whole tokens, with NaN in their rows."""
    device = generator.device
    shape = (axes["num_partials"], axes["num_tokens"], axes["num_experts_per_tok"], axes["moe_hidden_size"])
    dtype = getattr(torch, specialization.dtypes["rows_dtype"])
    scales = repeated(ROW_SCALES, shape[1] * shape[2], device).view(*shape[1:3], 1)
    ids = torch.randint(256, shape[1:3], generator=generator, device=device, dtype=torch.int32)
    ids[torch.rand(shape[1:3], generator=generator, device=device) < 0.2] = -1
    ids[TOKEN_SPAN - 1 :: TOKEN_SPAN] = -1
    rows = torch.randn(shape, generator=generator, device=device) * scales
    rows = rows.masked_fill((ids < 0)[..., None], torch.nan)
    weights = torch.rand(shape[1:3], generator=generator, device=device)
    return {
        "rows": rows.to(dtype),
        "topk_ids": ids,
        "topk_weights": weights / weights.sum(dim=-1, keepdim=True),
        "weight": (0.2 * torch.randn(shape[3], generator=generator, device=device)).bfloat16(),
        "eps": 1e-8,
    }
