"""What the kernel computes: a product per group in float64, rounded to BF16 once."""

from collections.abc import Mapping

import torch

from jitspark.spec import Specialization


def grouped_skinny_gemm_bf16(
    activation: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, **tiling: object
) -> None:
    """Fill out [num_tokens, groups * group_rows]. The tiling only orders FP32 sums, which float64 does not see."""
    products = torch.bmm(activation.double(), weight.double().transpose(1, 2))
    out.copy_(products.transpose(0, 1).flatten(1))


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Weights that keep sums of `in_features` products near 1."""
    shape = (axes["groups"], axes["group_rows"], axes["in_features"])
    weight = torch.randn(shape, generator=generator, device=generator.device)
    return {"weight": weight.mul_(axes["in_features"] ** -0.5).to(torch.bfloat16)}
