"""The experts' two GEMMs over routes to a given number of distinct experts, NVFP4 and BF16.

Every launch reads experts that the launches before it have not read for more than the L2 cache holds. All 256 experts
of a rank are there; the routes of a set go to `distinct` of them, as evenly as can be.
"""

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import stock
from bench.expert_weights import INPUT_SCALE, Nvfp4Experts, bf16_experts, draw_nvfp4, nvfp4_experts
from bench.scene import OURS, Call, Scene, beyond, contenders, in_turn, relative_error

K = 8  # experts of a token
NVFP4_BOUND = 0.15  # relative error of rows whose h was quantized to NVFP4
BF16_BOUND = 0.02
CHECKED = 4  # experts whose rows are compared
MAX_SETS = 8

Kernel = Callable[..., Any]
Values = Mapping[str, Any]


def nvfp4(part: Values, kernels: Mapping[str, Kernel], generator: torch.Generator) -> Scene:
    """Roles first and second, or one of them."""
    sizes, tokens = part["sizes"], part["num_tokens"]
    hidden, width = _widths(part)
    experts = nvfp4_experts(sizes["num_experts"], hidden, width, generator)
    sets = [
        _nvfp4_values(experts, routes, tokens, (hidden, width), generator)
        for routes in _route_sets(sizes, tokens, generator)
    ]
    ours = [_nvfp4_calls(experts, values, kernels) for values in sets]
    both = {"first", "second"} <= kernels.keys()
    others, absent = contenders({"Marlin NVFP4": partial(_marlin, experts, sets)}) if both else ({}, [])
    wrong: dict[str, str] = {}
    if both:
        ours[0]()
        where, want = _expected(sets[0], partial(_nvfp4_row, experts, sets[0]))
        wrong = beyond(OURS, relative_error(sets[0]["rows"].flatten(0, 1)[where], want), NVFP4_BOUND)
        for name, calls in others.items():
            wrong |= beyond(name, relative_error(calls[0]().flatten(0, 1)[where], want), BF16_BOUND)
    return Scene(
        _nvfp4_moved(part, experts, hidden, width), {OURS: ours, **others}, wrong, _unchecked(both=both), absent
    )


def _widths(part: Values) -> tuple[int, int]:
    """The experts' width and the rank's inner width."""
    axes = next(iter(part["launches"].values()))["axes"]
    width = axes["intermediate_width"] if "intermediate_width" in axes else 2 * axes["packed_width"]
    return axes["moe_hidden_size"], width


def _unchecked(*, both: bool) -> dict[str, str]:
    return {} if both else {OURS: "one GEMM alone is held to its reference by bin/check-gpu only"}


def _route_sets(sizes: Values, tokens: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Expert ids [tokens, 8] of each set; sets have no expert in common, as far as there are enough."""
    order = torch.randperm(sizes["num_experts"], generator=generator, device=generator.device)
    subsets = order.split(sizes["distinct"])
    whole = [subset for subset in subsets if len(subset) == sizes["distinct"]][:MAX_SETS]
    while len(whole) < 2:  # one set alone goes by more than L2 holds
        whole.append(whole[0])
    return (spread(subset, tokens, generator) for subset in whole)


def spread(subset: Tensor, tokens: int, generator: torch.Generator) -> Tensor:
    """Ids [tokens, 8] over all of `subset`, as even as can be, eight different ones for a token."""
    assert K <= len(subset) <= tokens * K
    while True:
        rounds = -(-tokens * K // len(subset))
        orders = [torch.randperm(len(subset), generator=generator, device=generator.device) for _ in range(rounds)]
        ids = subset[torch.cat(orders)[: tokens * K]].view(tokens, K)
        if all(len(row.unique()) == K for row in ids):
            return ids.int()
        if len(subset) == K:
            return subset.expand(tokens, K).int()


def schedule(ids: Tensor, num_experts: int) -> dict[str, Tensor]:
    """What `sigmoid_bias_topk_routing` writes for these ids."""
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    distinct, counts = chosen.unique(return_counts=True)
    expert_ids = torch.full((num_experts,), -1, dtype=torch.int32, device=ids.device)
    expert_ids[: len(distinct)] = distinct.int()
    offsets = torch.full((num_experts + 1,), chosen.numel(), dtype=torch.int32, device=ids.device)
    offsets[0] = 0
    offsets[1 : len(distinct) + 1] = counts.cumsum(0).int()
    return {"expert_ids": expert_ids, "route_offsets": offsets, "routes": order.int().view(ids.shape)}


def _nvfp4_values(
    experts: Nvfp4Experts, ids: Tensor, tokens: int, widths: tuple[int, int], generator: torch.Generator
) -> Values:
    hidden, width = widths
    device = generator.device
    codes, scales = draw_nvfp4((tokens,), hidden, generator)
    h_codes, h_scales = draw_nvfp4((tokens, K), width, generator)
    return {
        "ids": ids,
        "schedule": schedule(ids, len(experts.first)),
        "codes": codes,
        "scales": scales,
        "h_codes": h_codes,
        "h_scales": h_scales,
        "rows": torch.zeros((tokens, K, hidden), device=device),
    }


def _nvfp4_calls(experts: Nvfp4Experts, values: Values, kernels: Mapping[str, Kernel]) -> Call:
    plan = [values["schedule"][name] for name in ("expert_ids", "route_offsets", "routes")]
    h = [values["h_codes"], values["h_scales"]]
    arguments = {
        "first": (
            values["codes"],
            values["scales"],
            experts.first,
            experts.first_scales,
            experts.gate_up_scales,
            experts.global_scale,
            *plan,
            *h,
            0,
        ),
        "second": (*h, experts.second, experts.second_scales, experts.down_scales, *plan, values["rows"], 0),
    }
    return in_turn(*(partial(kernel, *arguments[role]) for role, kernel in kernels.items()))


_MARLIN: dict[int, dict[str, Tensor]] = {}  # the last weights only: repacking takes seconds


def _marlin_weights(address: int, plain: ItemsView[str, Tensor]) -> dict[str, Tensor]:
    if address not in _MARLIN:
        _MARLIN.clear()
        _MARLIN[address] = stock.marlin_weights(dict(plain))
    return _MARLIN[address]


def _marlin(experts: Nvfp4Experts, sets: Sequence[Values]) -> Sequence[Call]:
    weights = _marlin_weights(experts.first.data_ptr(), experts.plain.items())
    made = []
    for values in sets:
        hidden = (experts.dequantize(values["codes"], values["scales"]) * INPUT_SCALE).bfloat16()
        even = torch.full(values["ids"].shape, 1.0 / K, device=hidden.device)
        made.append(stock.marlin_experts(weights, hidden, even, values["ids"]))
    return made


def _nvfp4_row(experts: Nvfp4Experts, values: Values, expert: int, routes: Tensor) -> Tensor:
    hidden = experts.dequantize(values["codes"], values["scales"])[routes // K] * INPUT_SCALE
    return experts.rows(expert, hidden.double())


def _expected(values: Values, rows_of: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Routes to the first few experts, and their rows in float64."""
    ids, offsets, routes = (values["schedule"][name] for name in ("expert_ids", "route_offsets", "routes"))
    flat, bounds = routes.flatten().long(), offsets.tolist()
    found = [flat[bounds[i] : bounds[i + 1]] for i in range(CHECKED)]
    rows = [rows_of(expert, routes) for expert, routes in zip(ids.tolist(), found, strict=False)]
    return torch.cat(found), torch.cat(rows)


def _nvfp4_moved(part: Values, experts: Nvfp4Experts, hidden: int, width: int) -> int:
    """Each distinct expert's weights once; activations, h and rows once."""
    tokens, distinct = part["num_tokens"], part["sizes"]["distinct"]
    moved = 0
    h = tokens * K * (width // 2 + width // 16)
    if "first" in part["launches"]:
        moved += distinct * (experts.first.shape[1] + experts.first_scales.shape[1])
        moved += tokens * (hidden // 2 + hidden // 16) + h
    if "second" in part["launches"]:
        moved += distinct * (experts.second.shape[1] + experts.second_scales.shape[1])
        moved += h + tokens * K * hidden * 4
    return int(moved)


def bf16(part: Values, kernels: Mapping[str, Kernel], generator: torch.Generator) -> Scene:
    """Roles first and second."""
    sizes, tokens = part["sizes"], part["num_tokens"]
    hidden, width = _widths(part)
    w13, w2 = bf16_experts(sizes["num_experts"], hidden, width, generator)
    sets = [
        {
            "ids": ids,
            "schedule": schedule(ids, len(w13)),
            "activation": torch.randn((tokens, hidden), generator=generator, device=w13.device).bfloat16(),
            "h": torch.zeros((tokens, K, width), dtype=torch.bfloat16, device=w13.device),
            "rows": torch.zeros((tokens, K, hidden), device=w13.device),
        }
        for ids in _route_sets(sizes, tokens, generator)
    ]
    ours = [_bf16_calls(w13, w2, values, kernels) for values in sets]
    others, absent = contenders({"vLLM Triton experts, summed": partial(_triton, w13, w2, sets)})
    ours[0]()
    where, want = _expected(sets[0], partial(_bf16_row, w13, w2, sets[0]))
    wrong = beyond(OURS, relative_error(sets[0]["rows"].flatten(0, 1)[where], want), BF16_BOUND)
    for name, calls in others.items():
        wrong |= beyond(name, relative_error(calls[0](), sets[0]["rows"].mean(dim=1)), BF16_BOUND)
    rows = tokens * (2 * hidden + K * (4 * width + 4 * hidden))
    moved = sizes["distinct"] * 6 * hidden * width + rows
    return Scene(moved, {OURS: ours, **others}, wrong, absent=absent)


def _bf16_calls(w13: Tensor, w2: Tensor, values: Values, kernels: Mapping[str, Kernel]) -> Call:
    plan = [values["schedule"][name] for name in ("expert_ids", "route_offsets", "routes")]
    return in_turn(
        partial(kernels["first"], values["activation"], w13, *plan, values["h"], 0),
        partial(kernels["second"], values["h"], w2, *plan, values["rows"], 0),
    )


def _triton(w13: Tensor, w2: Tensor, sets: Sequence[Values]) -> Sequence[Call]:
    even = torch.full((*sets[0]["ids"].shape,), 1.0 / K, device=w13.device)
    return [stock.triton_experts(w13, w2, values["activation"], even, values["ids"]) for values in sets]


def _bf16_row(w13: Tensor, w2: Tensor, values: Values, expert: int, routes: Tensor) -> Tensor:
    gate, up = (values["activation"][routes // K].double() @ w13[expert].double().t()).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ w2[expert].double().t()
