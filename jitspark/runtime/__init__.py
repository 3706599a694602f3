"""The specialized decode of Muse Spark, switched on by `additional_config={"decode_backend": "latency_specialized"}`.

This module owns the decision whether a deployment runs it, and with which settings. It refuses nothing silently: a
deployment that asked for the specialized decode and cannot have it gets one readable reason. Importing it imports
neither vLLM nor torch.
"""

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jitspark.geometry import DEFAULT_GEOMETRY, load_geometry
from jitspark.runtime import decode, options, support_check, text_config
from jitspark.runtime.support_check import Served

AUTO = "auto"
LATENCY_SPECIALIZED = "latency_specialized"

_MUSE_SPARK_OPEN = load_geometry(DEFAULT_GEOMETRY)
# What a text config must hold, field by field, to be Muse Spark Open's.
MUSE_SPARK_CONFIG: Mapping[str, Any] = text_config.text_config_values(_MUSE_SPARK_OPEN)
TP_SIZES: tuple[int, ...] = _MUSE_SPARK_OPEN.tp_sizes

logger = logging.getLogger("jitspark")


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """The settings that a deployment's plans are bound with.

    tp: ranks that share a layer.
    q: tokens of one request in a verify step, its last token and the proposed ones.
    max_context: tokens a request may hold, as the config says now; vLLM may lower it once it knows its memory.
    capture_sizes: vLLM's capture list as it is, served or not: rounding and choosing is the plans' business.
    """

    tp: int
    q: int
    max_context: int
    capture_sizes: tuple[int, ...]


def decode_backend(vllm_config: Any) -> str:
    """The decode backend that the deployment asks for; "auto" where `additional_config` says nothing or is no dict."""
    asked = vllm_config.additional_config
    return asked.get("decode_backend", AUTO) if isinstance(asked, dict) else AUTO


def specialized_decode_config(vllm_config: Any) -> DecodeConfig | None:
    """The settings of a deployment that runs the specialized decode, None for one that runs stock.

    Stock is what "auto" means, and what a deployment that cannot be served falls back to, with one warning, where
    its `on_error` is "stock". Otherwise raises ValueError, for a backend of another name and with the reason of an
    unsupported deployment; UsageError for options that cannot be understood, GeometryError for a bad geometry.
    """
    backend = decode_backend(vllm_config)
    if backend == AUTO:
        return None
    if backend != LATENCY_SPECIALIZED:
        raise ValueError("Supported decode_backend values are auto/latency_specialized")
    reason = unsupported(vllm_config)
    if reason is None:
        return _decode_config(vllm_config)
    message = f"Muse Spark specialized decode does not support {reason}"
    if options.may_give_up(vllm_config):
        _warn_once(f"{message}; running stock (on_error)")
        return None
    raise _explained(ValueError(message), vllm_config)


def unsupported(vllm_config: Any) -> str | None:
    """The first reason why this deployment cannot run the specialized decode, or None when it can.

    Deployment first (`support_check`), then what the chosen providers require (`decode.provider_requirements`).
    Only the config is read, apart from this machine's GPU and the versions of optional libraries. Raises
    UsageError for options that cannot be understood or a missing vLLM, GeometryError for a bad geometry.
    """
    reason = next(support_check.reasons(vllm_config, served(vllm_config)), None)
    return decode.provider_requirements(vllm_config) if reason is None else reason


def served(vllm_config: Any) -> Served:
    """What this deployment is compared with: Muse Spark Open on SM100/103, or what its options opt in to instead."""
    chosen = options.from_vllm_config(vllm_config)
    if chosen.geometry is None:
        return Served(MUSE_SPARK_CONFIG, TP_SIZES, chosen.targets)
    backbone = chosen.backbone()
    return Served(text_config.text_config_values(backbone), backbone.tp_sizes, chosen.targets, backbone.name)


def text_config_differences(vllm_config: Any) -> tuple[text_config.Difference, ...]:
    """Every field in which the model's text config is not what this deployment is compared with."""
    return tuple(text_config.differences(vllm_config.model_config.hf_text_config, served(vllm_config).text_config))


def _decode_config(vllm_config: Any) -> DecodeConfig:
    return DecodeConfig(
        tp=vllm_config.parallel_config.tensor_parallel_size,
        q=1 + vllm_config.speculative_config.num_speculative_tokens,
        max_context=vllm_config.model_config.max_model_len,
        capture_sizes=tuple(vllm_config.compilation_config.cudagraph_capture_sizes or ()),
    )


def _explained(error: ValueError, vllm_config: Any) -> ValueError:
    """The error with the differing fields as notes: its text is fixed, and a traceback shows notes below it."""
    for difference in text_config_differences(vllm_config):
        error.add_note(f"text config: {difference}")
    return error


@functools.cache
def _warn_once(message: str) -> None:
    # backbone, draft and their states all ask; a process says it once
    logger.warning(message)
