"""Which module builds the scene of each kind of part."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench import scenes_attention, scenes_dense, scenes_experts
from bench.scene import Scene

Build = Callable[[Mapping[str, Any], Mapping[str, Callable[..., Any]], torch.Generator], Scene]

BUILD: Mapping[str, Build] = {
    "attention": scenes_attention.build,
    "nvfp4_experts": scenes_experts.nvfp4,
    "bf16_experts": scenes_experts.bf16,
    "router": scenes_dense.router,
    "logits": scenes_dense.logits,
}
