"""What `doctor --vllm` checks beside the rest: whether a vLLM started here would find the decode runtime."""

import importlib.metadata
from collections.abc import Callable, Mapping

from jitspark.doctor.check import FailedError
from jitspark.settings import Settings, allowed_vllm_plugins
from jitspark.vllm_release import KNOWN, has_own_decode, unknown_release

GROUP, NAME = "vllm.general_plugins", "jitspark"
FLASHINFER = ("flashinfer-python", "0.7.2.post1")  # as `runtime.flashinfer_ops`


def release(_: Settings) -> str:
    unknown = unknown_release()
    if unknown is not None:
        raise FailedError(unknown, f"Install vllm=={KNOWN[-1]}, or leave decoding to vLLM.")
    return importlib.metadata.version("vllm")


def entry_point(_: Settings) -> str:
    found = next((each for each in importlib.metadata.entry_points(group=GROUP) if each.name == NAME), None)
    if found is None:
        raise FailedError(f"no entry point {NAME} of {GROUP}", "Install jitspark as a package, here.")
    allowed = allowed_vllm_plugins()
    if allowed is not None and NAME not in allowed:
        raise FailedError(f"VLLM_PLUGINS leaves {NAME} out", f"Add {NAME} to VLLM_PLUGINS, or unset it.")
    return found.value


def implementation(_: Settings) -> str:
    if has_own_decode():
        raise FailedError(
            "this vLLM brings a specialized decode of Muse Spark itself, which runs",
            'Choose with additional_config["jitspark"]["implementation"].',
            needed=False,
        )
    return "vLLM has no specialized decode of Muse Spark itself"


def torch(_: Settings) -> str:
    try:
        found = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise FailedError("no torch", "Install the torch that vLLM wants.") from None
    if found.endswith("+cpu"):
        raise FailedError(found, "Install a torch for CUDA to run a model here.", needed=False)
    return found


def flashinfer(_: Settings) -> str:
    name, wanted = FLASHINFER
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if found != wanted:
        raise FailedError(f"{found}, not {wanted}", "Only the provider flashinfer needs it.", needed=False)
    return found


CHECKS: Mapping[str, Callable[[Settings], str]] = {
    "vLLM": release,
    "vLLM plugin": entry_point,
    "vLLM's own decode": implementation,
    "torch": torch,
    "FlashInfer": flashinfer,
}
