"""Pairs of dense launches: the router with the pooler's shard, lm_head with the soft cap."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import stock
from bench.scene import OURS, Call, Scene, beyond, contenders, in_turn, relative_error
from bench.workload import TOKEN_SETS, rotation_bytes

MULTIPLIER, CAP = 0.1767766952966369, 20.0
BOUND = 0.005  # relative error against float64: outputs are rounded to BF16
ROUTER_BOUND = 1e-5
STOCK_ROUTER_TOKENS = 32  # more of them vLLM multiplies in FP32

Kernel = Callable[..., Any]
Values = Mapping[str, Any]


def router(part: Values, kernels: Mapping[str, Kernel], generator: torch.Generator) -> Scene:
    """Role router_pooler, or where two launches do it router and pooler: both read the same activations."""
    launches, tokens = part["launches"], part["num_tokens"]
    axes = launches.get("router_pooler", launches.get("router"))["axes"]
    hidden, experts = axes["hidden_size"], axes["num_experts"]
    rows = axes["pooled_width"] if "pooled_width" in axes else launches["pooler"]["axes"]["weight_rows"]
    weight_bytes = hidden * (4 * experts + 2 * rows)
    count = -(-rotation_bytes() // weight_bytes // TOKEN_SETS) * TOKEN_SETS
    sets = [
        {
            "activation": _normal((tokens, hidden), generator).bfloat16(),
            "router": _normal((experts, hidden), generator) * hidden**-0.5,
            "pooler": (_normal((rows, hidden), generator) * hidden**-0.5).bfloat16(),
            "logits": torch.empty((tokens, experts), device=generator.device),
            "pooled": torch.empty((tokens, rows), dtype=torch.bfloat16, device=generator.device),
        }
        for _ in range(count)
    ]
    ours = [_router_calls(kernels, values) for values in sets]
    stock_name = f"vLLM {'fp32_router_gemm' if tokens <= STOCK_ROUTER_TOKENS else 'FP32 product'} + cuBLAS"
    found, absent = contenders({stock_name: partial(_stock_router, sets)})
    wrong: dict[str, str] = {}
    for name, calls in {OURS: ours, **found}.items():
        calls[0]()
        wrong |= _router_problems(name, sets[0])
    moved = weight_bytes + tokens * (2 * hidden + 4 * experts + 2 * rows)
    return Scene(moved, {OURS: ours, **found}, wrong, absent=absent)


def _router_calls(kernels: Mapping[str, Kernel], values: Values) -> Call:
    if "router_pooler" in kernels:
        names = ("activation", "router", "pooler", "logits", "pooled")
        return partial(kernels["router_pooler"], *(values[name] for name in names))
    return in_turn(
        partial(kernels["router"], values["activation"], values["router"], values["logits"]),
        partial(kernels["pooler"], values["activation"], values["pooler"], values["pooled"]),
    )


def _stock_router(sets: Sequence[Values]) -> Sequence[Call]:
    return [
        in_turn(
            stock.router(values["activation"], values["router"], values["logits"]),
            partial(torch.mm, values["activation"], values["pooler"].t(), out=values["pooled"]),
        )
        for values in sets
    ]


def _router_problems(name: str, values: Values) -> dict[str, str]:
    rows = values["activation"].double()
    logits = relative_error(values["logits"], rows @ values["router"].double().t())
    pooled = relative_error(values["pooled"], rows @ values["pooler"].double().t())
    return beyond(name, logits, ROUTER_BOUND) or beyond(name, pooled, BOUND)


def logits(part: Values, kernels: Mapping[str, Kernel], generator: torch.Generator) -> Scene:
    """Roles lm_head and soft_cap."""
    axes, tokens = part["launches"]["lm_head"]["axes"], part["num_tokens"]
    vocab, hidden = axes["weight_rows"], axes["in_features"]
    sets = [
        {
            "activation": _normal((tokens, hidden), generator).bfloat16(),
            "weight": (_normal((vocab, hidden), generator) * 20 * hidden**-0.5).bfloat16(),
            "logits": torch.empty((tokens, vocab), dtype=torch.bfloat16, device=generator.device),
            "out": torch.empty((tokens, vocab), device=generator.device),
        }
        for _ in range(max(2, -(-rotation_bytes() // (vocab * hidden * 2))))
    ]
    ours = [_logits_calls(kernels, values) for values in sets]
    found, absent = contenders({"cuBLAS + vLLM soft cap": partial(_stock_logits, sets)})
    wrong: dict[str, str] = {}
    for name, calls in {OURS: ours, **found}.items():
        calls[0]()
        wrong |= beyond(name, relative_error(sets[0]["out"], _capped(sets[0])), BOUND)
    moved = vocab * hidden * 2 + tokens * (2 * hidden + 4 * vocab)
    return Scene(moved, {OURS: ours, **found}, wrong, absent=absent)


def _logits_calls(kernels: Mapping[str, Kernel], values: Values) -> Call:
    return in_turn(
        partial(kernels["lm_head"], values["activation"], values["weight"], values["logits"]),
        partial(kernels["soft_cap"], values["logits"], values["out"], MULTIPLIER, CAP),
    )


def _stock_logits(sets: Sequence[Values]) -> Sequence[Call]:
    return [
        in_turn(
            partial(torch.mm, values["activation"], values["weight"].t(), out=values["logits"]),
            stock.soft_cap(values["logits"], values["out"], MULTIPLIER, CAP),
        )
        for values in sets
    ]


def _capped(values: Values) -> Tensor:
    product = torch.mm(values["activation"].float(), values["weight"].float().t()).double()
    return CAP * torch.tanh(product * (MULTIPLIER / CAP))


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)
