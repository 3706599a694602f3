"""How vLLM finds the runtime: the entry point `vllm.general_plugins`, called in each of its processes.

It tells vLLM's registry by name which classes take Muse Spark's places, and imports none of them. Those classes leave a
deployment that does not ask for the specialized decode to vLLM's own ones. Refuses models that it does not know.
"""

import logging
from typing import Any

from jitspark.notice import say_once
from jitspark.vllm_release import KNOWN, has_own_decode, require_known_release, unknown_release

logger = logging.getLogger("jitspark")

# architecture: (where the known vLLM has its own class, what takes its place)
BACKBONE = "MuseSparkForConditionalGeneration"
MODELS = {
    BACKBONE: (
        ("vllm.models.muse_spark", "MuseSparkForConditionalGeneration"),
        ("jitspark.models.muse_spark", "MuseSparkForConditionalGeneration"),
    ),
    "MuseSparkDSparkModel": (
        ("vllm.models.muse_spark.common.dspark", "MuseSparkDSparkForCausalLM"),
        ("jitspark.models.dspark", "MuseSparkDSparkForCausalLM"),
    ),
}


def register() -> None:
    """Put our classes into vLLM's registry. Does nothing where they are already there.

    In a vLLM of another version our backbone still takes its place, if the model lies where the known version has it:
    a deployment that asks for the specialized decode is refused there, and every other one gets vLLM's own class.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    _log_beside_vllm()
    MODELS_CONFIG_MAP.setdefault(BACKBONE, ConfigCheck)
    unknown = unknown_release()
    if unknown is not None:
        say_once(f"jitspark leaves decoding to vLLM: {unknown}.")
    for architecture, (stock, ours) in MODELS.items():
        if unknown is not None and architecture != BACKBONE:
            continue  # the backbone refuses first
        registered = _location(ModelRegistry.models.get(architecture))
        if registered == stock:
            ModelRegistry.register_model(architecture, ":".join(ours))
        elif registered != ours and unknown is None:
            say_once(f"jitspark stays out of {architecture}: {_whose(registered)}, not vLLM {KNOWN[-1]}'s.")


class ConfigCheck:
    """What vLLM calls when it completes a config of the backbone, long before a worker starts: for readable errors.

    Only what a config shows by then is looked at. Nothing is changed.
    """

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        """Raise ValueError for an unknown backend, UsageError for bad options and for a vLLM that is not known."""
        from jitspark.runtime import AUTO, LATENCY_SPECIALIZED, decode_backend, options

        backend = decode_backend(vllm_config)
        if backend == AUTO:
            return
        if backend != LATENCY_SPECIALIZED:
            raise ValueError("Supported decode_backend values are auto/latency_specialized")
        chosen = options.from_vllm_config(vllm_config)
        if chosen.implementation == options.JITSPARK or not has_own_decode():
            require_known_release()

    @staticmethod
    def verify_and_update_model_config(_: Any) -> None:
        """Nothing is asked of a model's config alone."""


def _log_beside_vllm() -> None:
    """Let our log lines go where vLLM's go, at vLLM's level: it sets both up later than this, and perhaps again."""
    if not logger.handlers:
        logger.parent = logging.getLogger("vllm")


def _location(registered: Any) -> tuple[str, str] | None:
    """Module and class of an entry of the registry, None for one that is no lazy entry or is not there."""
    module, name = (getattr(registered, field, None) for field in ("module_name", "class_name"))
    return None if module is None or name is None else (module, name)


def _whose(registered: tuple[str, str] | None) -> str:
    return "it is unknown here" if registered is None else f"it is {':'.join(registered)}"
