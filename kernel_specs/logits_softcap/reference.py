"""What `logits_softcap` computes, in float64."""

from collections.abc import Mapping

import torch
from torch import Tensor

from jitspark.spec import Specialization


def logits_softcap(logits: Tensor, out: Tensor, multiplier: float, cap: float, **_: int) -> None:
    out.copy_(cap * torch.tanh(logits.double() * (multiplier / cap)))


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor | float]:
    """Ordinary logits, every second one of any size, infinities and zeros among them; FP32 scalars."""
    shape = (axes["num_rows"], axes["vocab_size"])
    device = generator.device
    logits = 20 * torch.randn(shape, generator=generator, device=device)
    exponents = 60 * torch.rand((shape[0], shape[1] // 2), generator=generator, device=device) - 30
    logits[:, ::2] = logits[:, ::2].sign() * 10**exponents
    special = torch.tensor([torch.inf, -torch.inf, 0.0, -0.0], device=device)
    logits.view(-1)[-4:] = special[torch.randperm(4, generator=generator, device=device)]
    scalars = torch.tensor([0.1767766952966369, 20.0 if shape[0] % 2 else 30.0], dtype=torch.float32)
    return {"logits": logits.bfloat16(), "multiplier": scalars[0].item(), "cap": scalars[1].item()}
