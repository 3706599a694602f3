"""What a vLLM worker brings to the decode runtime: its ranks, its device, its model's layers."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.platforms import current_platform

from jitspark.errors import RankError
from jitspark.notice import say_once
from jitspark.runtime import AUTO, DecodeConfig, options, specialized_decode_config
from jitspark.runtime.backbone import BackboneDecode
from jitspark.runtime.backbone_tensors import routed_experts
from jitspark.runtime.expert_tp import ExpertShares
from jitspark.runtime.fallback import attempted
from jitspark.runtime.prepared import Prepared, device_target, on_all_ranks, prepare
from jitspark.runtime.ranks import RankGroup
from jitspark.runtime.reasons import Kind, Reason, left_by
from jitspark.runtime.symmetric_memory import exchange_memory
from jitspark.vllm_release import has_own_decode, require_known_release

SUPPORT = "the support check"
REFUSED = "its support check refuses the specialized decode"
BLACKWELL_TARGETS = ("sm_100a", "sm_103a")


def ranks() -> RankGroup:
    """This worker's TP group."""
    return RankGroup.of_coordinator(get_tp_group())


def prepare_backbone(vllm_config: VllmConfig) -> Prepared | None:
    """Plans and kernels of this deployment's backbone, on all ranks; None, on all of them, for stock.

    Raises what `specialized_decode_config` and `on_all_ranks` raise, UsageError in a vLLM that is not known.
    """
    config = _config_on_all_ranks(vllm_config)
    made = None if config is None else _prepared_on_all_ranks(vllm_config, config)
    if made is None:
        # the draft is built from the same config later: it must not run what the backbone does not
        vllm_config.additional_config["decode_backend"] = AUTO
    return made


def _prepared_on_all_ranks(vllm_config: VllmConfig, config: DecodeConfig) -> Prepared | None:
    chosen = options.from_vllm_config(vllm_config)

    def work(tell: Any) -> Prepared:
        capability = current_platform.get_device_capability()
        target = device_target((capability.major, capability.minor), chosen.targets or BLACKWELL_TARGETS)
        return prepare(vllm_config, config, target, tell)

    return on_all_ranks(work, ranks(), chosen.on_error)


def _config_on_all_ranks(vllm_config: VllmConfig) -> DecodeConfig | None:
    """The settings; None, on all ranks, where the support check of one leaves it to stock.

    All have the same config, but not surely the same GPU, nor on another node the same vLLM and FlashInfer.
    """
    group = ranks()
    with group.telling(SUPPORT):
        require_known_release()
        config = specialized_decode_config(vllm_config)
    failed = group.failures(SUPPORT, repr(config), Reason(Kind.BARRED, REFUSED) if config is None else None)
    if not failed:
        return config
    rank, reason = left_by(failed, (Kind.BARRED,), _unsupported, rank=group.rank)
    if config is not None:
        say_once(f"Muse Spark runs vLLM's own decode (on_error): rank {rank}: {reason}: see its own log")
    return None


def _unsupported(rank: int, reason: Reason) -> RankError:
    return RankError(
        where=SUPPORT,
        found=f"rank {rank}: {reason.text}",
        needed="a deployment that all ranks support alike",
        remedy="Run all ranks on equal GPUs and in equal environments, and start them again.",
    )


def asked_of_us(vllm_config: VllmConfig) -> bool:
    """Whether a deployment that asks for the specialized decode wants this one, rather than vLLM's own."""
    if not has_own_decode() or options.from_vllm_config(vllm_config).implementation == options.JITSPARK:
        return True
    say_once(
        "The specialized decode of this vLLM itself runs, not jitspark's. To choose: "
        f'{options.SECTION}["implementation"] = "jitspark", or VLLM_PLUGINS without jitspark.'
    )
    return False


def take_experts(model: Any, prepared: Prepared, vllm_config: VllmConfig) -> ExpertShares:
    """The shares of the model's routed experts, to be taken while vLLM loads it."""
    layers = routed_experts(model)
    shares = ExpertShares(
        prepared.deployment.backbone.experts, sorted(layers), ranks(), may_give_up=options.may_give_up(vllm_config)
    )
    shares.tap(layers)
    return shares


def attempt(part: Callable[[], None], vllm_config: VllmConfig, step: str, digest: str = "") -> bool:
    """A part of the start on all ranks; False, on all of them, where stock is to run since one cannot.

    Otherwise raises this rank's own error, or RankError with that of another one. digest: of what must be equal on all.
    """
    group = ranks()

    def work() -> bool:
        with group.together(step, digest):
            part()
        return True

    return attempted(work, group, step, "decode", may_give_up=options.may_give_up(vllm_config)) is True


def bind_backbone(model: Any, vllm_config: VllmConfig, device: torch.device) -> BackboneDecode | None:
    """The decode of a loaded model, on all ranks. Raises what keeps this rank from it, or RankError.

    None, on all ranks, where stock is to run since one of them cannot, now or when it took the experts.
    """
    group, prepared, shares = ranks(), model.prepared, model.expert_shares
    if shares.given_up:
        return None
    chosen = options.from_vllm_config(vllm_config)

    def work() -> BackboneDecode:
        exchanges = None
        if group.size > 1:
            sizes = prepared.deployment.backbone.tp_sizes
            exchanges = exchange_memory(prepared.plans, group, device, sizes, exchanges=chosen.exchanges)
        with group.together("binding the backbone's plans"):
            return BackboneDecode(
                model,
                prepared,
                shares,
                device,
                max_model_len=vllm_config.model_config.max_model_len,
                ranks=group,
                exchanges=exchanges,
            )

    made = attempted(work, group, "binding the backbone", "backbone", may_give_up=options.may_give_up(vllm_config))
    if made is None:
        shares.drop()
    return made
