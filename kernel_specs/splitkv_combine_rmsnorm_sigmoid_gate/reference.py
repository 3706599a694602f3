"""What `splitkv_combine_rmsnorm_sigmoid_gate` computes, in float64 with the documented rounding points."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.primitives.rows_reference import repeated, rms_normed

HEAD_DIM = 64


def splitkv_combine_rmsnorm_sigmoid_gate(
    partial_max: Tensor, partial_sum: Tensor, partial_out: Tensor, qkvg: Tensor, out: Tensor, eps: float, **_: int
) -> None:
    """Writes `out` [num_tokens, num_heads * 64]."""
    maxima = partial_max.double()
    empty = maxima == -torch.inf
    largest = maxima.amax(dim=-1, keepdim=True)
    weights = torch.exp2(maxima - torch.where(largest == -torch.inf, 0.0, largest))
    total = (weights * partial_sum.double().masked_fill(empty, 0.0)).sum(dim=-1)
    summed = (weights[..., None] * partial_out.double().masked_fill(empty[..., None], 0.0)).sum(dim=-2)
    nothing = (total == 0)[..., None]
    attended = (summed / total[..., None]).masked_fill(nothing, 0.0).bfloat16().double()
    gate = qkvg[:, -out.shape[1] :].view(attended.shape).double()
    normed = rms_normed(attended, eps)
    out.copy_((normed * torch.sigmoid(gate)).masked_fill(nothing, 0.0).view(out.shape))


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """About a third of the splits and every fifth token without keys, with NaN in what must not be used of them."""
    device = generator.device
    by_split = (axes["num_tokens"], specialization.axes["num_heads"], axes["num_splits"])

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    empty = torch.rand(by_split, generator=generator, device=device) < 1 / 3
    empty[..., 0] = False
    padding = torch.arange(by_split[0], device=device) % 5 == 3
    empty[padding] = True
    scales = repeated((1.0, 40.0, 0.01), by_split[1], device)[:, None]
    maxima = normal(*by_split) * scales
    sums = 1.0 + 100.0 * torch.rand(by_split, generator=generator, device=device)
    qkvg = normal(by_split[0], specialization.axes["qkvg_size"]) * 4.0
    qkvg[:, -2:] = torch.tensor((200.0, -200.0), device=device)
    qkvg[padding] = torch.nan
    return {
        "partial_max": maxima.masked_fill(empty, -torch.inf),
        "partial_sum": sums.masked_fill(empty, torch.nan),
        "partial_out": (normal(*by_split, HEAD_DIM) * sums[..., None]).masked_fill(empty[..., None], torch.nan),
        "qkvg": qkvg.bfloat16(),
        "eps": 1e-5,
    }
