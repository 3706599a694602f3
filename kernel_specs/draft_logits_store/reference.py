"""What `draft_logits_store` does: copies of rows."""

from collections.abc import Mapping

import torch

from jitspark.spec import Specialization


def draft_logits_store(logits: torch.Tensor, sample_idx_mapping: torch.Tensor, draft_logits: torch.Tensor) -> None:
    """Put logits [num_requests * num_steps, vocab_size] where live requests' steps have their row."""
    requests, steps = (sample_idx_mapping >= 0).nonzero(as_tuple=True)
    rows = logits.view(*sample_idx_mapping.shape, -1)
    draft_logits[sample_idx_mapping[requests, steps], steps] = rows[requests, steps]


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Requests in any states; of several the last is inert."""
    states = torch.randperm(axes["num_states"], generator=generator, device=generator.device)
    mapping = states[: axes["num_requests"], None].repeat(1, axes["num_steps"])
    if axes["num_requests"] > 1:
        mapping[-1] = -1
    return {"sample_idx_mapping": mapping}
