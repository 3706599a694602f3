"""The dense launches of one backbone layer in a row, as a step makes them: what launch gaps cost shows only here."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from bench.baselines import Baseline, baselines
from bench.measure import OURS, Measured
from bench.packed_cache import specialization_of
from bench.timing import chain, time_chains
from bench.workload import build, rotation_bytes

LAYERS = 12
PARTS = (  # in the step's order
    "backbone FFN to next layer",
    "qkv_gate",
    "qk append, RoPE",
    "o_proj",
    "backbone attention to FFN",
    "pooler_shard",
    "unpooler_shard",
)

Kernel = Callable[..., Any]


def measure_layer(
    found: Sequence[Measured], kernels: Mapping[str, Kernel], generator: torch.Generator, replays: int
) -> dict[str, Any] | None:
    """Microseconds per layer, with our kernels and with each part's fastest baseline.

    `found` are the parts' own measurements at one TP and M, `kernels` our functions by recipe. None when a part is
    missing. Launches are in the step's order but use their own buffers; experts and attention are left out.
    """
    parts = {each.launch["part"].partition(" / ")[0]: each for each in found if OURS in each.timings}
    chosen = [parts[name] for name in PARTS if name in parts]
    if len(chosen) < len(PARTS):
        print(
            f"no time for a layer's dense launches: not measured here: {', '.join(sorted(set(PARTS) - parts.keys()))}"
        )
        return None
    works = [build(specialization_of(each.launch), each.launch["axes"], generator, rotation_bytes()) for each in chosen]
    ours = [Baseline(OURS, _caller(kernels[each.launch["recipe"]])) for each in chosen]
    others = [_fastest(each) for each in chosen]
    sequences = {
        name: [
            _bound(who, work.sets[layer % len(work.sets)])
            for layer in range(LAYERS)
            for who, work in zip(whos, works, strict=True)
        ]
        for name, whos in ((OURS, ours), ("baselines", others))
    }
    chains = {name: chain(calls, 4 * len(calls), kinds=len(PARTS)) for name, calls in sequences.items()}
    timings = time_chains(chains, 4 * LAYERS, replays)
    return {
        "parts": list(PARTS),
        "num_tokens": chosen[0].launch["axes"]["num_tokens"],
        "tp": chosen[0].launch["tp"],
        "floor_us": sum(each.floor_us for each in chosen),
        "baselines": [each.best_baseline for each in chosen],
        "us": {name: timing.median_us for name, timing in timings.items()},
    }


def _fastest(found: Measured) -> Baseline:
    made = {each.name: each for each in baselines(specialization_of(found.launch))}
    assert found.best_baseline is not None
    return made[found.best_baseline]


def _caller(kernel: Kernel) -> Callable[[Mapping[str, Any]], None]:
    return lambda values: kernel(*values.values())


def _bound(who: Baseline, values: Mapping[str, Any]) -> Callable[[], object]:
    return lambda: who.call(values)


def line(layer: Mapping[str, Any]) -> str:
    times = ", ".join(f"{name} {us:.2f} us" for name, us in layer["us"].items())
    place = f"dense launches of a layer, TP {layer['tp']}, M = {layer['num_tokens']}"
    return f"{place}: floor {layer['floor_us']:.2f} us, {times}"
