"""The sampling loop by its reference, over the vocabulary shards of all ranks: what runs where there is no GPU.

Exact: products accumulate in float64, so that how a vocabulary is cut changes no token and no logit. Torch only.
"""

from dataclasses import dataclass
from typing import Any

import torch

from jitspark.runtime.ranks import RankGroup
from kernel_specs.markov_gumbel_sampling.reference import cache_of_states, rounded_product, sample_steps
from kernel_specs.markov_gumbel_sampling.spec import STEP_INPUTS


@dataclass(frozen=True, slots=True)
class ReferenceLoop:
    """A rank's part of the loop.

    lm_head, markov_w2: its shard's rows, BF16, which begin at `first_token`; shards are equal, and in rank order.
    """

    lm_head: torch.Tensor
    markov_w1: torch.Tensor
    markov_w2: torch.Tensor
    first_token: int
    multiplier: float
    soft_cap: float | None
    ranks: RankGroup

    def run(
        self, hidden: torch.Tensor, draft_tokens: torch.Tensor, draft_logits: torch.Tensor, **step: torch.Tensor
    ) -> None:
        """Fill draft_tokens [requests, steps] and the live requests' rows of draft_logits, the same on all ranks.

        hidden: BF16 [requests * steps, hidden_size]. step: what `STEP_INPUTS` names.
        """
        requests, steps = draft_tokens.shape
        base_logits = rounded_product(hidden, self.lm_head).view(requests, steps, len(self.lm_head))
        inputs: dict[str, Any] = {name: step[name] for name in STEP_INPUTS}
        sample_steps(
            base_logits,
            self.markov_w1,
            self.markov_w2,
            **inputs,
            draft_tokens=draft_tokens,
            first_token=self.first_token,
            multiplier=self.multiplier,
            soft_cap=self.soft_cap,
            keep=cache_of_states(draft_logits, step["sample_idx_mapping"], self.first_token),
            exchange=self._winners,
        )
        self._share_logits(draft_logits, step["sample_idx_mapping"])

    def _winners(self, values: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The tokens whose values are largest over all ranks; of equal ones the lowest rank's, hence the lowest."""
        best = self.ranks.gather(values).argmax(dim=0, keepdim=True)
        return self.ranks.gather(tokens).gather(0, best)[0]

    def _share_logits(self, draft_logits: torch.Tensor, states: torch.Tensor) -> None:
        """Have every rank's columns of what the steps of live requests stored."""
        rows, steps = (states >= 0).nonzero(as_tuple=True)
        if not len(rows):
            return
        end = self.first_token + len(self.markov_w2)
        own = draft_logits[states[rows, steps], steps, self.first_token : end]
        shards = self.ranks.gather(own.contiguous().view(torch.uint8)).view(torch.bfloat16)
        draft_logits[states[rows, steps], steps] = torch.cat(tuple(shards), dim=-1)
