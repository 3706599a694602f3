"""What a vLLM worker brings to the decode runtime: its ranks, its device, its model's layers."""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform

from jitspark.runtime import DecodeConfig, options, specialized_decode_config
from jitspark.runtime.backbone import BackboneDecode
from jitspark.runtime.backbone_tensors import routed_experts
from jitspark.runtime.expert_tp import ExpertShares
from jitspark.runtime.prepared import Prepared, device_target, prepare
from jitspark.runtime.ranks import RankGroup

BLACKWELL_TARGETS = ("sm_100a", "sm_103a")


def ranks() -> RankGroup:
    """This worker's TP group."""
    return RankGroup.of_coordinator(get_tp_group())


def prepare_backbone(vllm_config: VllmConfig) -> Prepared:
    """Plans and kernels of this deployment's backbone, on all ranks. Raises as `prepared.prepare` does."""
    config = specialized_decode_config(vllm_config)
    assert isinstance(config, DecodeConfig), "asked before"
    group = ranks()
    with group.together("GPU"):
        capability = current_platform.get_device_capability()
        accepted = options.from_vllm_config(vllm_config).targets or BLACKWELL_TARGETS
        target = device_target((capability.major, capability.minor), accepted)
    return prepare(vllm_config, config, target, group)


def take_experts(model: Any, prepared: Prepared) -> ExpertShares:
    """The shares of the model's routed experts, to be taken while vLLM loads it."""
    layers = routed_experts(model)
    shares = ExpertShares(prepared.deployment.backbone.experts, sorted(layers), ranks())
    shares.tap(layers)
    return shares


def bind_backbone(model: Any, vllm_config: VllmConfig, device: torch.device) -> BackboneDecode:
    """The decode of a loaded model, on all ranks. Raises what keeps this rank from it, or RankError."""
    group = ranks()
    with group.together("binding the backbone's plans"):
        return BackboneDecode(
            model,
            model.prepared,
            model.expert_shares,
            device,
            rank=group.rank,
            max_model_len=vllm_config.model_config.max_model_len,
        )
