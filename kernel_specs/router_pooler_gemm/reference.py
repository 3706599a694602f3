"""What `router_pooler_gemm` computes, in float64; the pooler's product is rounded to BF16 once."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization
from kernel_specs.router_gemm import reference as router_gemm


def router_pooler_gemm(
    activation: Tensor, router: Tensor, pooler: Tensor, logits: Tensor, pooled: Tensor, **_: object
) -> None:
    rows = activation.double()
    logits.copy_(rows @ router.double().T)
    pooled.copy_(rows @ pooler.double().T)


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor]:
    """Activations and router as for `router_gemm`; a pooler whose sums are near 1."""
    drawn = router_gemm.random_arguments(specialization, axes, generator)
    shape = (axes["pooled_width"], axes["hidden_size"])
    pooler = torch.randn(shape, generator=generator, device=generator.device) * shape[1] ** -0.5
    return {"activation": drawn["activation"], "router": drawn["weight"], "pooler": pooler.bfloat16()}
