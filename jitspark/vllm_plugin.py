"""How vLLM finds the runtime: the entry point `vllm.general_plugins`, called in each of its processes.

It tells vLLM's registry by name which classes take Muse Spark's places, and imports none of them. Those classes leave a
deployment that does not ask for the specialized decode to vLLM's own ones. Refuses models that it does not know.
"""

import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from typing import Any

from jitspark.notice import say_once

logger = logging.getLogger("jitspark")

KNOWN_VLLM = ("0.33.0",)
# architecture: (where vLLM 0.33.0 has its own class, what takes its place)
MODELS = {
    "MuseSparkForConditionalGeneration": (
        ("vllm.models.muse_spark", "MuseSparkForConditionalGeneration"),
        ("jitspark.models.muse_spark", "MuseSparkForConditionalGeneration"),
    ),
    "MuseSparkDSparkModel": (
        ("vllm.models.muse_spark.common.dspark", "MuseSparkDSparkForCausalLM"),
        ("jitspark.models.dspark", "MuseSparkDSparkForCausalLM"),
    ),
}
OWN_DECODE = Path(
    "models", "muse_spark", "nvidia", "specialized_decode"
)  # below vLLM's package, should it come to have one


def register() -> None:
    """Put our classes into vLLM's registry. Does nothing where they are already there."""
    from vllm import ModelRegistry

    _log_beside_vllm()
    unknown = unknown_vllm()
    for architecture, (stock, ours) in MODELS.items():
        registered = _location(ModelRegistry.models.get(architecture))
        if registered == stock:
            ModelRegistry.register_model(architecture, ":".join(ours))
        elif registered != ours:
            say_once(f"jitspark stays out of {architecture}: {_whose(registered)}, not vLLM {KNOWN_VLLM[-1]}'s.")
    if unknown is not None:
        say_once(f"jitspark leaves decoding to vLLM: {unknown}.")


def _log_beside_vllm() -> None:
    """Let our log lines go where vLLM's go, unless somebody has already said where."""
    theirs = logging.getLogger("vllm")
    if not logger.handlers and theirs.handlers:
        for handler in theirs.handlers:
            logger.addHandler(handler)
        logger.setLevel(theirs.level)
        logger.propagate = theirs.propagate


def unknown_vllm() -> str | None:
    """Why the specialized decode cannot run in this vLLM, or None. Known versions may carry a build's local label."""
    try:
        found = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return "no distribution of the name vllm is installed"
    known = found.partition("+")[0] in KNOWN_VLLM
    return None if known else f"vLLM {found} is installed, and it knows {', '.join(KNOWN_VLLM)}"


def vllm_has_own_decode() -> bool:
    """Whether this vLLM brings a specialized decode of Muse Spark itself."""
    package = importlib.util.find_spec("vllm")
    folders = (package.submodule_search_locations if package is not None else None) or ()
    return any((Path(folder) / OWN_DECODE).is_dir() for folder in folders)


def _location(registered: Any) -> tuple[str, str] | None:
    """Module and class of an entry of the registry, None for one that is no lazy entry or is not there."""
    module, name = (getattr(registered, field, None) for field in ("module_name", "class_name"))
    return None if module is None or name is None else (module, name)


def _whose(registered: tuple[str, str] | None) -> str:
    return "it is unknown here" if registered is None else f"it is {':'.join(registered)}"
