"""What `router_gemm` computes, in float64."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization


def router_gemm(activation: Tensor, weight: Tensor, logits: Tensor, **_: int) -> None:
    logits.copy_(activation.double() @ weight.double().T)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """Logits of size 1: as many columns as there are have weights of their own size, from 2^-12 to 1 times the rest."""
    device = generator.device
    shape = (axes["num_experts"], axes["hidden_size"])
    sizes = 2.0 ** torch.randint(-12, 1, shape, generator=generator, device=device)
    sizes = torch.where(torch.rand(shape, generator=generator, device=device) < 0.3, sizes, 1.0)
    weight = torch.randn(shape, generator=generator, device=device) * sizes / shape[1] ** 0.5
    activation = torch.randn((axes["num_tokens"], shape[1]), generator=generator, device=device)
    return {"activation": activation.bfloat16(), "weight": weight}
