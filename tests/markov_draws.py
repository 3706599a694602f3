"""Inputs of the Markov sampling loop for tests."""

from types import SimpleNamespace

import torch

EDGES = (0, 1, -1, 7, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 0x0123456789ABCDEF, -(2**40) + 3)
STEPS = 7


def inputs(requests, states, vocab, rank, *, hidden=64, seed=0):
    """One draft step's tensors by name, weights included; the last of several requests is inert, state 0 greedy."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    def integers(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    mapping = torch.randperm(states, generator=generator)[:requests]
    if requests > 1:
        mapping[-1] = -1
    temperature = 0.5 + torch.rand(states, generator=generator)
    temperature[0] = 0.0
    return SimpleNamespace(
        hidden=normal(requests * STEPS, hidden),
        lm_head=normal(vocab, hidden, scale=8 * hidden**-0.5),
        markov_w1=normal(vocab, rank),
        markov_w2=normal(vocab, rank, scale=4 * rank**-0.5),
        step={
            "input_ids": integers(0, vocab, requests * STEPS).int(),
            "anchor_idx": torch.arange(requests) * STEPS,
            "sample_idx_mapping": mapping[:, None].repeat(1, STEPS),
            "sample_pos": integers(1, 5000, requests, STEPS),
            "seeds": integers(-(2**63), 2**63 - 1, states),
            "temperature": temperature,
        },
        draft_tokens=torch.full((requests, STEPS), -7),
        draft_logits=torch.full((states, STEPS, vocab), -3.0).bfloat16(),
    )
