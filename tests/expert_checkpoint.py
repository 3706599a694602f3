"""A checkpoint's routed experts in safetensors, and what a rank must hold of them, cut straight from the file.

The names are those that vLLM gives the consolidated tensors, below `layers.<index>.feed_forward.experts.`.
"""

from dataclasses import dataclass

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kernel_specs.nvfp4_grouped_gemm_partial.layout import repack_down
from kernel_specs.nvfp4_grouped_gemm_swiglu.layout import repack_gate_up

BYTES = torch.uint8
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Experts:
    """The fields of a geometry's experts that are read."""

    num_local_experts: int
    moe_hidden_size: int
    moe_intermediate_size: int
    weight_dtype: str = "nvfp4"
    bf16_layers: tuple[int, ...] = ()

    def is_nvfp4(self, layer):
        return self.weight_dtype == "nvfp4" and layer not in self.bf16_layers


def prefix(layer):
    return f"layers.{layer}.feed_forward.experts."


def write(path, experts, layers, seed=1):
    """Random codes and scales; a file of any layers that `experts` says to be NVFP4 or BF16."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in layers:
        made = nvfp4(experts, generator) if experts.is_nvfp4(layer) else bfloat16(experts, generator)
        tensors |= {prefix(layer) + name: tensor for name, tensor in made.items()}
    save_file(tensors, path)


def nvfp4(experts, generator):
    count, hidden, inner = experts.num_local_experts, experts.moe_hidden_size, experts.moe_intermediate_size

    def codes(*shape):
        return torch.randint(0, 256, shape, dtype=BYTES, generator=generator)

    def block_scales(*shape):  # any E4M3 but NaN, and no sign
        return torch.randint(0, 0x7F, shape, dtype=BYTES, generator=generator).view(E4M3)

    def scales(*shape):
        return torch.rand(shape, generator=generator) + 1e-3

    return {
        "w13_weight": codes(count, 2 * inner, hidden // 2),
        "w13_weight_scale": block_scales(count, 2 * inner, hidden // 16),
        "w13_weight_scale_2": scales(count, 2),
        "w13_input_scale": scales(count, 2),
        "w2_weight": codes(count, hidden, inner // 2),
        "w2_weight_scale": block_scales(count, hidden, inner // 16),
        "w2_weight_scale_2": scales(count),
        "w2_input_scale": scales(count),
    }


def bfloat16(experts, generator):
    count, hidden, inner = experts.num_local_experts, experts.moe_hidden_size, experts.moe_intermediate_size
    shapes = {"w13_weight": (count, 2 * inner, hidden), "w2_weight": (count, hidden, inner)}
    return {
        name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator).view(torch.bfloat16)
        for name, shape in shapes.items()
    }


def read(path, layer, *, experts=None, rows=None, columns=None):
    """The layer's tensors by name: these experts of them; w13 with these rows of gate and of up, w2 these columns.

    rows, columns: (rank, ranks) whose even share is meant.
    """
    with safe_open(path, framework="pt") as file:
        names = [name for name in file.keys() if name.startswith(prefix(layer))]  # noqa: SIM118 - not a mapping
        found = {name.removeprefix(prefix(layer)): file.get_slice(name)[experts or slice(None)] for name in names}
    for name in ("w13_weight", "w13_weight_scale"):
        if name in found and rows is not None:
            rank, ranks = rows
            gate, up = found[name].view(BYTES).chunk(2, dim=1)
            shared = torch.cat((gate.chunk(ranks, dim=1)[rank], up.chunk(ranks, dim=1)[rank]), dim=1)
            found[name] = shared.view(found[name].dtype)
    for name in ("w2_weight", "w2_weight_scale"):
        if name in found and columns is not None:
            rank, ranks = columns
            shared = found[name].view(BYTES).chunk(ranks, dim=2)[rank].contiguous()
            found[name] = shared.view(found[name].dtype)
    return found


def differing(path, layer, rank, ranks, held):
    """The names of those of the held tensors that are not, byte by byte, what the file's own share gives."""
    wrong, step = [], 2
    count = len(held["down.weight"])
    for first in range(0, count, step):  # a few at a time: all ranks of a test do this at once
        here = slice(first, min(first + step, count))
        share = read(path, layer, experts=here, rows=(rank, ranks), columns=(rank, ranks))
        wanted = _repacked(share) if "w13_weight_scale" in share else _plain(share)
        wrong += [name for name, tensor in wanted.items() if not equal_bytes(held[name][here], tensor)]
    if "gate_up.gate_up_scales" in held:
        wrong += [name for name, tensor in _scalars(path, layer).items() if not equal_bytes(held[name], tensor)]
    return sorted(set(wrong))


def equal_bytes(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.view(BYTES), other.view(BYTES))


def _plain(share):
    return {"gate_up.weight": share["w13_weight"], "down.weight": share["w2_weight"]}


def _repacked(share):
    gate_up = repack_gate_up(share["w13_weight"], share["w13_weight_scale"].view(BYTES))
    down = repack_down(share["w2_weight"], share["w2_weight_scale"].view(BYTES))
    names = ("gate_up.weight", "gate_up.weight_scales", "down.weight", "down.weight_scales")
    return dict(zip(names, (*gate_up, *down), strict=True))


def _scalars(path, layer):
    """One by one in FP32: what the specs of the grouped GEMMs say."""
    with safe_open(path, framework="pt") as file:
        w13, w2, a13, a2 = (
            file.get_tensor(prefix(layer) + name)
            for name in ("w13_weight_scale_2", "w2_weight_scale_2", "w13_input_scale", "w2_input_scale")
        )
    a13, a2 = a13.max(), a2.max()
    return {
        "gate_up.gate_up_scales": torch.stack([torch.stack([a13 * gate, a13 * up]) for gate, up in w13]),
        "down.down_scales": torch.stack([a2 * each for each in w2]),
        "input.global_scale": torch.stack([1 / a13]),
        "gate_up.global_scale": torch.stack([1 / a2]),
    }
