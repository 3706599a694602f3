"""Schedules of experts for the grouped GEMMs' references: reading one, and drawing one of every kind."""

# ruff: noqa: INP001 - kernel folders are namespace packages

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

PADDING = 0.15  # of the tokens
MISSING = 0.05  # of the routes


@dataclass(frozen=True, slots=True)
class Schedule:
    """The schedule's arguments as `sigmoid_bias_topk_routing` writes them, int32, and the first expert held here."""

    expert_ids: Tensor
    route_offsets: Tensor
    routes: Tensor
    first_expert: int

    def arguments(self) -> dict[str, Tensor | int]:
        names = ("expert_ids", "route_offsets", "routes", "first_expert")
        return {name: getattr(self, name) for name in names}

    def local(self, num_local_experts: int) -> Iterator[tuple[int, Tensor]]:
        """Each expert that is held here and has routes, counted from the first one held here, and those routes."""
        routes, offsets = self.routes.flatten().long(), self.route_offsets.tolist()
        for i, expert in enumerate(self.expert_ids.tolist()):
            if offsets[i] < offsets[i + 1] and 0 <= expert - self.first_expert < num_local_experts:
                yield expert - self.first_expert, routes[offsets[i] : offsets[i + 1]]


def draw(axes: Mapping[str, int], generator: torch.Generator) -> Schedule:
    """A valid schedule. Where a rank holds some experts only, they begin in the middle (always there: a graph holds
    its scalars); a single token then goes to experts elsewhere. With as many experts as routes each route has its own;
    with as many as a token chooses, all experts have all tokens. Else tokens are of some kind, with padding and missing
    routes among them.
    """
    num_experts, num_local, k = axes["num_experts"], axes["num_local_experts"], axes["num_experts_per_tok"]
    num_tokens = axes["num_tokens"]
    first = num_experts // num_local // 2 * num_local
    held = torch.arange(num_experts, device=generator.device) - first
    elsewhere = (held < 0) | (held >= num_local)
    if num_experts == num_tokens * k:
        ids = torch.randperm(num_experts, generator=generator, device=generator.device).view(num_tokens, k)
    else:
        scores = _scores(num_tokens, num_experts, k, first, generator)
        if num_tokens == 1 and num_local < num_experts:
            scores = scores.masked_fill(~elsewhere, -torch.inf)
        ids = scores.argsort(dim=-1, descending=True)[:, :k]
        if num_experts > k:
            ids = ids.masked_fill(_uniform((num_tokens, 1), generator) < PADDING, -1)
            ids = ids.masked_fill(_uniform((num_tokens, k), generator) < MISSING, -1)
    return _schedule(ids, num_experts, first)


def _scores(num_tokens: int, num_experts: int, k: int, first: int, generator: torch.Generator) -> Tensor:
    """Of each token for each expert: even, alike for all tokens, falling from `first` on, or for a few there only."""
    expert = (torch.arange(num_experts, device=generator.device) - first) % num_experts
    normal = torch.randn((num_tokens, num_experts), generator=generator, device=generator.device)
    kinds = (
        normal,
        normal[:1].expand_as(normal),
        normal - 0.5 * expert,
        normal + 100.0 * (expert < max(k, num_experts // 4)),
    )
    return kinds[_integer(len(kinds), generator)]


def _schedule(ids: Tensor, num_experts: int, first_expert: int) -> Schedule:
    """Routes sorted by expert, equal ones in their own order."""
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    order = order[chosen[order] >= 0]
    distinct, counts = chosen[order].unique(return_counts=True)
    expert_ids = torch.full((num_experts,), -1, dtype=torch.int32, device=ids.device)
    expert_ids[: len(distinct)] = distinct.int()
    offsets = torch.full((num_experts + 1,), len(order), dtype=torch.int32, device=ids.device)
    offsets[0] = 0
    offsets[1 : len(distinct) + 1] = counts.cumsum(0).int()
    routes = torch.full_like(chosen, -1, dtype=torch.int32)
    routes[: len(order)] = order.int()
    return Schedule(expert_ids, offsets, routes.view(ids.shape), first_expert)


def draw_weight(shape: tuple[int, int, int], schedule: Schedule, generator: torch.Generator) -> Tensor:
    """BF16 weights [experts, rows, K] that keep sums of K products near 1; NaN in experts that have no routes."""
    weight = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=generator.device)
    for expert, _ in schedule.local(shape[0]):
        drawn = torch.randn(shape[1:], generator=generator, device=generator.device)
        weight[expert] = drawn.mul_(shape[2] ** -0.5).to(torch.bfloat16)
    return weight


def draw_rows(shape: tuple[int, int], used: Tensor, generator: torch.Generator) -> Tensor:
    """BF16 rows, NaN in those that are not among `used` (indices)."""
    rows = torch.randn(shape, generator=generator, device=generator.device).to(torch.bfloat16)
    unused = torch.ones(shape[0], dtype=torch.bool, device=generator.device)
    unused[used] = False
    return rows.masked_fill_(unused[:, None], torch.nan)


def local_routes(schedule: Schedule, num_local_experts: int) -> Tensor:
    """All routes to experts held here."""
    found = [routes for _, routes in schedule.local(num_local_experts)]
    return torch.cat(found) if found else schedule.routes.flatten()[:0].long()


def _integer(below: int, generator: torch.Generator) -> int:
    return int(torch.randint(below, (1,), generator=generator, device=generator.device))


def _uniform(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device)
