"""What `rmsnorm` computes, in float64 with the documented rounding points."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives.rows_reference import repeated, rms_normed

ROW_SCALES = (1.0, 1e15, 1e-3, 0.0, 1e-20, 30.0, 1.0, 1e-6)


def rmsnorm(x: Tensor, *rest: Any, weighted: bool, gain_center: float, round_input: bool, **_: int) -> None:
    """`rest` is (weight, out, eps), or (out, eps) without a weight. Writes `out`."""
    *weight, out, eps = rest
    values = (x.bfloat16() if round_input else x).double()
    normed = rms_normed(values, eps)
    out.copy_(normed * (weight[0].double() + gain_center) if weighted else normed)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Rows of very different size, and a gain like a trained one."""
    dtype = getattr(torch, specialization.dtypes["input_dtype"])
    shape = (axes["num_tokens"], axes["hidden_size"])
    x = torch.randn(shape, generator=generator, device=generator.device)
    scales = repeated(ROW_SCALES, shape[0], generator.device)[:, None]
    weight = 0.2 * torch.randn(shape[1], generator=generator, device=generator.device)
    made = {"x": (x * scales).to(dtype), "eps": 1e-5}
    return made | ({"weight": weight.bfloat16()} if specialization.statics["weighted"] else {})
