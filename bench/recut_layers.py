"""A layer's routed experts for `bench.expert_recut`: as vLLM has loaded them with EP, and what a rank must hold.

Every expert is drawn from its own seed, so that each rank can draw all of them, one after the other: there is no
checkpoint in a file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from jitspark.runtime.ranks import RankGroup
from kernel_specs.nvfp4_grouped_gemm_partial.layout import repack_down
from kernel_specs.nvfp4_grouped_gemm_swiglu.layout import repack_gate_up

NVFP4_LAYER, BF16_LAYER = 0, 1
BYTES, E4M3 = torch.uint8, torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Experts:
    """The fields of a geometry's experts that are read."""

    num_local_experts: int
    moe_hidden_size: int
    moe_intermediate_size: int
    weight_dtype: str = "nvfp4"
    bf16_layers: tuple[int, ...] = (BF16_LAYER,)


class StockMethod:
    """In the place of vLLM's methods: it only spoils the checkpoint's order, as those do."""

    def process_weights_after_loading(self, layer: Any) -> None:
        for name in ("w13_weight", "w2_weight"):
            getattr(layer, name).data.view(BYTES).zero_()


class MuseSparkModelOptNvFp4FusedMoE(StockMethod):
    pass


class MuseSparkUnquantizedFusedMoE(StockMethod):
    pass


def drawn(experts: Experts, layer: int, expert: int, seed: int, device: torch.device) -> dict[str, Tensor]:
    """One expert as a checkpoint has it, by vLLM's parameter; the same on every rank."""
    hidden, width = experts.moe_hidden_size, experts.moe_intermediate_size
    generator = torch.Generator(device=device).manual_seed((seed * 2 + layer) * 100_003 + expert)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.int16, generator=generator, device=device)

    if layer == BF16_LAYER:
        shapes = {"w13_weight": (2 * width, hidden), "w2_weight": (hidden, width)}
        return {name: integers(-(2**15), 2**15, *shape).view(torch.bfloat16) for name, shape in shapes.items()}
    scales = torch.rand(6, generator=generator, device=device) + 1e-3
    return {
        "w13_weight": integers(0, 256, 2 * width, hidden // 2).to(BYTES),
        "w13_weight_scale": integers(0, 0x7F, 2 * width, hidden // 16).to(BYTES).view(E4M3),
        "w2_weight": integers(0, 256, hidden, width // 2).to(BYTES),
        "w2_weight_scale": integers(0, 0x7F, hidden, width // 16).to(BYTES).view(E4M3),
        "w13_weight_scale_2": scales[:2],
        "w2_weight_scale_2": scales[2],
        "w13_input_scale": scales[3:5],
        "w2_input_scale": scales[5],
    }


def empty_layer(experts: Experts, index: int, group: RankGroup, device: torch.device) -> SimpleNamespace:
    """A layer as vLLM makes it on this rank, before it loads anything."""
    here = experts.num_local_experts // group.size
    tensors = {}
    for name, one in drawn(experts, index, 0, 0, device).items():
        count = experts.num_local_experts if name.endswith("input_scale") else here  # vLLM keeps those of all experts
        tensors[name] = torch.empty((count, *one.shape), dtype=one.dtype, device=device)
    parallel = SimpleNamespace(
        enable_eplb=False, use_ep=True, ep_size=group.size, ep_rank=group.rank, tp_size=1, tp_rank=0
    )
    method = MuseSparkUnquantizedFusedMoE() if index == BF16_LAYER else MuseSparkModelOptNvFp4FusedMoE()
    return SimpleNamespace(
        quant_method=method,
        moe_config=SimpleNamespace(moe_parallel_config=parallel),
        expert_placement_strategy="linear",
        **{name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()},
    )


def load(layer: Any, index: int, experts: Experts, group: RankGroup, seed: int) -> None:
    """This rank's experts, and what each rank has of all."""
    here = experts.num_local_experts // group.size
    for expert in range(experts.num_local_experts):
        for name, tensor in drawn(experts, index, expert, seed, layer.w13_weight.device).items():
            place = expert if name.endswith("input_scale") else expert - group.rank * here
            if 0 <= place < len(getattr(layer, name)):
                getattr(layer, name).data[place].copy_(tensor)


def differing(
    index: int, experts: Experts, group: RankGroup, held: Mapping[str, Tensor], seed: int
) -> dict[str, list[int]]:
    """By held tensor, the experts that are not what the slice of the whole expert is; -1 for what all share."""
    wrong: dict[str, list[int]] = {}
    device = held["down.weight"].device
    scales = []
    for expert in range(experts.num_local_experts):
        whole = drawn(experts, index, expert, seed, device)
        for name, wanted in _share(whole, group).items():
            if not torch.equal(held[name][expert].view(BYTES), wanted.view(BYTES)):
                wrong.setdefault(name, []).append(expert)
        scales += [{name: each for name, each in whole.items() if name.endswith(("_scale_2", "input_scale"))}]
    if index != BF16_LAYER:
        for name, wanted in _scalars(scales).items():
            if not torch.equal(held[name], wanted):
                wrong.setdefault(name, []).append(-1)
    return wrong


def _share(whole: Mapping[str, Tensor], group: RankGroup) -> dict[str, Tensor]:
    """A rank's slice of one expert: rows of gate, the same of up, the same columns of down; as the kernels read it."""

    def rows(name: str) -> Tensor:
        gate, up = (each.chunk(group.size, dim=0)[group.rank] for each in whole[name].view(BYTES).chunk(2, dim=0))
        return torch.cat((gate, up))[None]

    def columns(name: str) -> Tensor:
        return whole[name].view(BYTES).chunk(group.size, dim=1)[group.rank].contiguous()[None]

    if "w13_weight_scale" not in whole:
        return {"gate_up.weight": rows("w13_weight")[0], "down.weight": columns("w2_weight")[0]}
    gate_up = repack_gate_up(rows("w13_weight"), rows("w13_weight_scale"))
    down = repack_down(columns("w2_weight"), columns("w2_weight_scale"))
    names = ("gate_up.weight", "gate_up.weight_scales", "down.weight", "down.weight_scales")
    return {name: tensor[0] for name, tensor in zip(names, (*gate_up, *down), strict=True)}


def _scalars(scales: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    a13 = torch.stack([each["w13_input_scale"] for each in scales]).max()
    a2 = torch.stack([each["w2_input_scale"] for each in scales]).max()
    return {
        "gate_up.gate_up_scales": a13 * torch.stack([each["w13_weight_scale_2"] for each in scales]),
        "down.down_scales": a2 * torch.stack([each["w2_weight_scale_2"] for each in scales]),
        "input.global_scale": (1.0 / a13)[None],
        "gate_up.global_scale": (1.0 / a2)[None],
    }
