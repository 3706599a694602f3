"""What `context_rmsnorm` computes, in float64 with the documented rounding points."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives.rows_reference import repeated, rms_normed

ROW_SCALES = (1.0, 1e15, 1e-3, 0.0, 1e-20, 30.0, 1.0, 1e-6)


def context_rmsnorm(
    context: Tensor, weight: Tensor, layer_weights: Tensor, out: Tensor, eps: float, *, gain_center: float, **_: int
) -> None:
    """Fill out [num_layers, num_tokens, hidden_size]."""
    x = (rms_normed(context.double(), eps) * (weight.double() + gain_center)).bfloat16().double()
    out.copy_(rms_normed(x, eps) * (layer_weights.double()[:, None] + gain_center))


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Rows of very different size, and gains like trained ones."""
    num_tokens, hidden_size = axes["num_tokens"], axes["hidden_size"]

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device)

    scales = repeated(ROW_SCALES, num_tokens, generator.device)[:, None]
    return {
        "context": (normal(num_tokens, hidden_size) * scales).bfloat16(),
        "weight": (0.2 * normal(hidden_size)).bfloat16(),
        "layer_weights": (0.2 * normal(axes["num_layers"], hidden_size)).bfloat16(),
        "eps": 1e-5,
    }
