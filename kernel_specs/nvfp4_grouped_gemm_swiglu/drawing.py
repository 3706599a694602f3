"""Random NVFP4 operands and schedules for the references of both grouped GEMMs, and what they are worth. Torch only."""

# ruff: noqa: INP001 - kernel folders are namespace packages

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from kernel_specs.primitives.nvfp4_tiling import BLOCK

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN_SCALE = 0x7F
PLAIN_EXPONENT = 7  # the field of E4M3 that means 2^0

Schedule: TypeAlias = dict[str, Tensor | int]


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """float64 values of codes [..., n / 2], low four bits first, with scales [..., n / 16]: exact."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.float64, device=codes.device)
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    widened = scales.view(torch.float8_e4m3fn).float().double()
    return table[nibbles.int()] * widened.repeat_interleave(BLOCK, dim=-1)


def draw_matrix(rows: tuple[int, ...], columns: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes [*rows, columns / 2] and scales [*rows, columns / 16].

    The scales of a row span two binades, which keeps sums of products of two rows within FP32's 24 bits, so that the
    order of summation does not show. Every fifth row or so lies anywhere in E4M3's range; a twentieth of the scales
    is 0.
    """
    device = generator.device
    blocks = (*rows, columns // BLOCK)

    def integers(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device)

    codes = integers(0, 256, (*rows, columns // 2)).to(torch.uint8)
    base = torch.where(integers(0, 5, (*rows, 1)) == 0, integers(0, 15, (*rows, 1)), PLAIN_EXPONENT)
    scales = ((base + integers(0, 2, blocks)) << 3) | integers(0, 8, blocks)
    scales = scales.clamp(max=NAN_SCALE - 1)
    return codes, torch.where(integers(0, 20, blocks) == 0, 0, scales).to(torch.uint8)


def draw_schedule(axes: Mapping[str, int], generator: torch.Generator) -> Schedule:
    """Who goes where, as `sigmoid_bias_topk_routing` writes it, and the first local expert.

    Four or more times as many experts as local ones: no route meets a local one. As many as routes: each route has
    its own. Else a token has random experts, of all or of few, or none (padding).
    """
    device = generator.device
    tokens, k, experts = axes["num_tokens"], axes["num_experts_per_tok"], axes["num_experts"]
    local = axes["num_local_experts"]
    first = local * (tokens // 8 % (experts // local))  # a scalar stays what it is when a graph is replayed
    order = torch.rand((tokens, experts), generator=generator, device=device)
    few = torch.rand((tokens, 1), generator=generator, device=device) < 0.4
    order += few * (torch.arange(experts, device=device) >= k)
    if experts >= 4 * local:
        strangers = (torch.arange(experts, device=device) - first).clamp(-1, local) % (local + 1)
        order += 4.0 * (strangers < local)
    ids = order.argsort(dim=1)[:, :k].flatten()
    if experts == tokens * k and experts < 4 * local:
        ids = torch.randperm(experts, generator=generator, device=device)
    elif experts > 1:
        padding = torch.rand((tokens, 1), generator=generator, device=device) < 0.2
        ids = ids.masked_fill(padding.expand(tokens, k).flatten(), -1)
    return {**_schedule(ids, (tokens, k), experts), "first_expert": first}


def _schedule(ids: Tensor, shape: tuple[int, int], experts: int) -> dict[str, Tensor]:
    by_expert = ids.sort(stable=True)
    kept = by_expert.indices[by_expert.values >= 0]
    distinct, counts = ids[ids >= 0].unique(sorted=True, return_counts=True)
    expert_ids = torch.full((experts,), -1, dtype=torch.int32, device=ids.device)
    expert_ids[: len(distinct)] = distinct.int()
    offsets = torch.full((experts + 1,), len(kept), dtype=torch.int32, device=ids.device)
    offsets[0] = 0
    offsets[1 : len(distinct) + 1] = counts.cumsum(0).int()
    routes = torch.full((ids.numel(),), -1, dtype=torch.int32, device=ids.device)
    routes[: len(kept)] = kept.int()
    return {"expert_ids": expert_ids, "route_offsets": offsets, "routes": routes.view(shape)}


def in_order(schedule: Schedule) -> tuple[Tensor, Tensor, Tensor, int]:
    """What `local_routes` takes first."""
    ids, offsets, routes = (schedule[name] for name in ("expert_ids", "route_offsets", "routes"))
    first = schedule["first_expert"]
    assert isinstance(ids, Tensor) and isinstance(offsets, Tensor) and isinstance(routes, Tensor)
    assert isinstance(first, int)
    return ids, offsets, routes, first


def local_routes(
    expert_ids: Tensor, route_offsets: Tensor, routes: Tensor, first_expert: int, num_local_experts: int
) -> Iterator[tuple[int, Tensor]]:
    """(expert as its place among the local ones, its routes) of every active local expert."""
    offsets = route_offsets.tolist()
    for i, expert in enumerate(expert_ids.tolist()):
        mine = expert - first_expert
        if offsets[i + 1] > offsets[i] and 0 <= mine < num_local_experts:
            yield mine, routes.flatten()[offsets[i] : offsets[i + 1]].long()


def spoil_unused(schedule: Schedule, weight: Tensor, weight_scales: Tensor, *factors: Tensor) -> None:
    """Make every local expert without routes NaN."""
    used = [expert for expert, _ in local_routes(*in_order(schedule), weight.shape[0])]
    unused = torch.ones(weight.shape[0], dtype=torch.bool, device=weight.device)
    unused[used] = False
    weight[unused] = 0xFF
    weight_scales[unused] = NAN_SCALE
    for each in factors:
        each[unused] = torch.nan
