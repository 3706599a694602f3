"""A pair of checkpoints with NVFP4 experts, made of one whose experts are BF16.

    python -m bench.nvfp4_pair PAIR OUT

PAIR has `target` and `draft`, of `tiny` with BF16 experts; OUT gets the same with the experts of all layers but the
first and the last quantized, as Muse Spark Open's checkpoint has them, and the names and the quantization config that
vLLM reads (ModelOpt's, weights and activations). The geometry is bench/tiny_nvfp4.toml. Input scales differ by expert,
as in a calibrated checkpoint; nothing is calibrated here: what they let through is set below.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from kernel_specs.rmsnorm_nvfp4_quantize.reference import BLOCK, MAX_E4M3, MIDPOINTS

MAX_E2M1 = 6.0
WEIGHTS = "model.safetensors"
LAYER = "model.language_model.layers.{}.mlp.experts."
# Normed rows of a few hundred columns stay below the first; SwiGLU of unit normal numbers below the second
INPUT_LIMIT, HIDDEN_LIMIT = 8.0, 16.0
UNQUANTIZED = ("*self_attn*", "*vision*", "*audio*", "*mlp.gate*", "*embed_tokens*", "lm_head")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.nvfp4_pair", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("pair", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    quantize_pair(options.pair, options.out)
    return 0


def quantize_pair(pair: Path, out: Path) -> None:
    """Write the pair's quantized twin. Its draft is the same."""
    shutil.copytree(pair / "draft", out / "draft", dirs_exist_ok=True)
    shutil.copytree(pair / "target", out / "target", dirs_exist_ok=True, ignore=shutil.ignore_patterns(WEIGHTS))
    config = json.loads((pair / "target" / "config.json").read_text(encoding="utf-8"))
    layers = config["text_config"]["num_hidden_layers"]
    kept = sorted({0, layers - 1})
    config["quantization_config"] = quantization_config(kept)
    (out / "target" / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tensors = load_file(pair / "target" / WEIGHTS)
    generator = torch.Generator().manual_seed(0)
    for layer in sorted(set(range(layers)) - set(kept)):
        tensors |= dict(_experts(tensors, LAYER.format(layer), generator))
    save_file({name: each.contiguous() for name, each in tensors.items()}, out / "target" / WEIGHTS, {"format": "pt"})


def quantization_config(bf16_layers: Sequence[int]) -> dict[str, Any]:
    """ModelOpt's, for config.json: everything is NVFP4 that is not listed."""
    four_bits = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": BLOCK}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": BLOCK,
        "config_groups": {"group_0": {"weights": four_bits, "input_activations": four_bits, "targets": ["Linear"]}},
        "ignore": [LAYER.format(layer).rstrip(".") + "*" for layer in bf16_layers] + list(UNQUANTIZED),
    }


def quantize(weight: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., n / 2], the even column in the low bits, and E4M3 scales [..., n / 16] of `weight` [..., n].

    weight = code * scale * global_scale, nearly; `global_scale` broadcasts against the scales.
    """
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    scales = (blocks.abs().amax(dim=-1) / MAX_E2M1 / global_scale).to(torch.float8_e4m3fn)
    step = (scales.float() * global_scale).clamp(min=torch.finfo(torch.float32).tiny)
    values = (blocks / step[..., None]).flatten(-2)
    codes = torch.bucketize(values.abs(), torch.tensor(MIDPOINTS)).to(torch.uint8)
    codes |= torch.signbit(values).to(torch.uint8) << 3
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def _experts(tensors: dict[str, Tensor], prefix: str, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer's experts by their names: gate and up have a global scale each, and so has down."""
    gate_up, down = tensors[prefix + "gate_up_proj"], tensors[prefix + "down_proj"]
    count = len(gate_up)
    halves = gate_up.unflatten(1, (2, -1))  # gate, up
    scale = halves.float().abs().amax(dim=(2, 3)) / (MAX_E2M1 * MAX_E4M3)
    codes, scales = quantize(halves, scale[:, :, None, None])
    yield prefix + "gate_up_proj", codes.flatten(1, 2)
    yield prefix + "gate_up_proj_weight_scale", scales.flatten(1, 2)
    yield prefix + "gate_up_proj_weight_scale_2", scale
    yield prefix + "gate_up_proj_input_scale", _input_scales(INPUT_LIMIT, (count, 1), generator).repeat(1, 2)
    scale = down.float().abs().amax(dim=(1, 2)) / (MAX_E2M1 * MAX_E4M3)
    codes, scales = quantize(down, scale[:, None, None])
    yield prefix + "down_proj", codes
    yield prefix + "down_proj_weight_scale", scales
    yield prefix + "down_proj_weight_scale_2", scale
    yield prefix + "down_proj_input_scale", _input_scales(HIDDEN_LIMIT, (count,), generator)


def _input_scales(limit: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """What a calibration up to `limit` gives the largest of them."""
    part = 0.5 + 0.5 * torch.rand(shape, generator=generator)
    return limit / (MAX_E2M1 * MAX_E4M3) * part / part.max()


if __name__ == "__main__":
    sys.exit(main())
