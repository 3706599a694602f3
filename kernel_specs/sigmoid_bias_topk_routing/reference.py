"""What `sigmoid_bias_topk_routing` computes: scores in float64, rounded to FP32 where the selection compares them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jitspark.spec import Specialization

LOWEST_LOGIT = -87.0
SATURATED = 20.0  # from here on the FP32 sigmoid is 1
SMALLEST = 1e-15
# FP32 implementations of the sigmoid differ by a few ulp: choices closer than this would be a matter of luck.
CLEAR = 1e-5
ROUNDS = 200


def sigmoid_bias_topk_routing(logits: Tensor, bias: Tensor, *rest: Any, padded: bool, **_: Any) -> None:
    """`rest` is [is_padding], then the six outputs in the spec's order."""
    *mask, topk_ids, topk_weights, expert_ids, route_offsets, routes, num_distinct_experts = rest
    scores = _scores(logits)
    ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, : topk_ids.shape[1]]
    chosen = scores.gather(1, ids).double()
    weights = chosen / (chosen.sum(dim=-1, keepdim=True) + SMALLEST)
    if padded:
        ids = ids.masked_fill(mask[0][:, None] != 0, -1)
        weights = weights.masked_fill(mask[0][:, None] != 0, 0.0)
    topk_ids.copy_(ids)
    topk_weights.copy_(weights)
    _schedule(ids.flatten(), expert_ids, route_offsets, routes, num_distinct_experts)


def _scores(logits: Tensor) -> Tensor:
    return torch.sigmoid(logits.double().clamp(min=LOWEST_LOGIT)).float()


def _schedule(
    ids: Tensor, expert_ids: Tensor, route_offsets: Tensor, routes: Tensor, num_distinct_experts: Tensor
) -> None:
    """Routes sorted by expert, equal ones in their own order."""
    by_expert = ids.sort(stable=True)
    kept = by_expert.indices[by_expert.values >= 0]
    distinct, counts = ids[ids >= 0].unique(sorted=True, return_counts=True)
    expert_ids.fill_(-1)
    expert_ids[: len(distinct)] = distinct
    route_offsets.fill_(len(kept))
    route_offsets[0] = 0
    route_offsets[1 : len(distinct) + 1] = counts.cumsum(0)
    routes.view(-1).fill_(-1)
    routes.view(-1)[: len(kept)] = kept.int()
    num_distinct_experts.fill_(len(distinct))


def random_arguments(
    specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator
) -> dict[str, Tensor]:
    made: dict[str, Tensor] = random_choices(axes, generator, padded=bool(specialization.statics["padded"]))
    return made


def random_choices(axes: Mapping[str, int], generator: torch.Generator, *, padded: bool) -> dict[str, Tensor]:
    """Tokens of very different kinds, with choices that are either clear or exact ties; every third token padding."""
    device = generator.device
    num_tokens, experts = axes["num_tokens"], axes["num_experts"]
    # eighths, so that equal logits often meet equal biases
    bias = torch.randint(-2, 3, (experts,), generator=generator, device=device) / 8
    logits = _tokens(num_tokens, bias, axes["num_experts_per_tok"], generator)
    made = {"logits": logits, "bias": bias}
    if padded:
        mask = torch.randint(3, (num_tokens,), generator=generator, device=device) == 0
        made["is_padding"] = mask.to(torch.uint8) * 255  # anything but 0
    return made


def _tokens(num_tokens: int, bias: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """Rows, redrawn until none has a choice that is neither clear nor an exact tie."""
    logits = _draw(num_tokens, bias.shape[0], k, generator)
    for _ in range(ROUNDS):
        unclear = _unclear(logits, bias, k)
        if not bool(unclear.any()):
            return logits
        logits = torch.where(unclear[:, None], _draw(num_tokens, bias.shape[0], k, generator), logits)
    raise AssertionError("no clear choices found")


def _draw(num_tokens: int, experts: int, k: int, generator: torch.Generator) -> Tensor:
    """Ordinary, tied, saturated, vanishing, all equal, the same experts for all, different experts for each."""
    device = generator.device

    def normal() -> Tensor:
        return torch.randn((num_tokens, experts), generator=generator, device=device)

    wide = 20 * normal()
    token = torch.arange(num_tokens, device=device)[:, None]
    expert = torch.arange(experts, device=device)[None, :]
    kinds = torch.stack(
        (
            2 * normal(),
            (4 * normal()).round() / 2,  # ties
            30 + 10 * normal().abs(),  # saturated
            -200 - normal().abs(),  # scores of 1e-38
            torch.zeros((num_tokens, experts), device=device),
            normal() + 12.0 * (expert >= experts - k),  # the last experts
            normal() + 12.0 * ((expert - token * k) % experts < k),  # different ones for each token
            torch.where(wide.abs() < SATURATED, wide / 4, wide),
        )
    )
    kind = torch.randint(len(kinds), (num_tokens,), generator=generator, device=device)
    return kinds[kind, token[:, 0]]


def _unclear(logits: Tensor, bias: Tensor, k: int) -> Tensor:
    """Rows where two neighbours among the best, or among what is close to the last chosen, are close but not alike."""
    alike = logits.double().clamp(LOWEST_LOGIT, SATURATED)
    best = (torch.sigmoid(alike) + bias.double()).sort(dim=-1, descending=True, stable=True)
    logits_of, bias_of = alike.gather(1, best.indices), bias[best.indices]
    matters = best.values[:, 1:] > best.values[:, k - 1 : k] - CLEAR
    close = best.values[:, :-1] - best.values[:, 1:] < CLEAR
    tied = (logits_of[:, :-1] == logits_of[:, 1:]) & (bias_of[:, :-1] == bias_of[:, 1:])
    return (matters & close & ~tied).any(dim=-1)
