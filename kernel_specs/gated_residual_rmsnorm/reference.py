"""What `gated_residual_rmsnorm` computes, in float64 with the documented rounding points."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives.rows_reference import repeated, rms_normed

# Rows repeat this pattern: (scale of the branch, scale of the stream)
ROW_SCALES = ((1.0, 1.0), (3e4, 1.0), (1e-4, 1.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1e12), (0.0, 0.0), (1e-20, 1e-3))


def gated_residual_rmsnorm(
    branch: Tensor,
    stream: Tensor,
    *rest: Any,
    mode: str,
    post_norm: str,
    gain_center: float,
    write_tap: bool,
    write_router_input: bool,
    **_: int,
) -> None:
    """`rest` is [post_weight], alpha, beta, weight, activation, [tap], [router_input], post_eps, eps.

    Updates `stream` in place; writes `activation`, `tap` and `router_input`.
    """
    remaining = list(rest)
    z = branch.double()
    if post_norm == "input_scale":
        z = z * (remaining.pop(0).double() + 1.0)
    alpha, beta, weight, activation, *copies, post_eps, eps = remaining
    y = rms_normed(z, post_eps)
    if mode == "draft":
        y = y.bfloat16().double()
    blended = alpha.double() * stream.double() + beta.double() * y
    stream.copy_(blended)
    if write_tap:
        copies.pop(0).copy_(blended)
    x = blended.bfloat16().double() if mode == "draft" else blended
    normed = rms_normed(x, eps) * (weight.double() + gain_center)
    activation.copy_(normed)
    if write_router_input:
        copies.pop(0).copy_(normed)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Rows of very different size; alpha^2 + beta^2 = 1 with alpha^2 >= 1e-3, as the residual gate makes them."""
    shape = (axes["num_tokens"], axes["hidden_size"])

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=generator.device)

    scales = repeated(ROW_SCALES, shape[0], generator.device)
    alpha = torch.sigmoid(normal(shape[1])).clamp(min=1e-3).sqrt()
    made = {
        "branch": (normal(*shape) * scales[:, :1]).bfloat16(),
        "stream": normal(*shape) * scales[:, 1:],
        "alpha": alpha,
        "beta": (1.0 - alpha.square()).sqrt(),
        "weight": (0.2 * normal(shape[1])).bfloat16(),
        "post_eps": 1e-8,
        "eps": 1e-5,
    }
    weighted = specialization.statics["post_norm"] == "input_scale"
    return made | ({"post_weight": (0.2 * normal(shape[1])).bfloat16()} if weighted else {})
