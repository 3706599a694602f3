"""What the kernel computes: a product in float64, rounded to BF16 once, or at the three points of `silu_mul`."""

from collections.abc import Mapping

import torch

from jitspark.spec import Specialization

ROWS_AT_ONCE = 4096  # float64 copies of a whole lm_head shard would take gigabytes


def skinny_gemm_bf16(
    activation: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *, epilogue: str, **tiling: object
) -> None:
    """Fill out [num_tokens, out_features] from activation [num_tokens, in_features], weight [weight_rows, in_features].

    The tiling only orders FP32 sums, which float64 does not see.
    """
    product = _rounded_product(activation, weight)
    if epilogue == "silu_mul":
        gate, up = product.double().chunk(2, dim=-1)
        product = gate * torch.sigmoid(gate) * up
    out.copy_(product)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Weights that keep sums of `in_features` products near 1, where silu bends."""
    shape = (axes["weight_rows"], axes["in_features"])
    weight = torch.randn(shape, generator=generator, device=generator.device)
    return {"weight": weight.mul_(axes["in_features"] ** -0.5).to(torch.bfloat16)}


def _rounded_product(activation: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = activation.double()
    parts = [(rows @ part.double().T).to(torch.bfloat16) for part in weight.split(ROWS_AT_ONCE)]
    return torch.cat(parts, dim=-1)
