"""Which vLLM is installed, and whether it is one that the decode runtime knows. Imports nothing of it."""

import os

from jitspark.errors import UsageError

KNOWN = ("0.33.0",)
# below vLLM's package, should it come to have a specialized decode of Muse Spark itself
_OWN_DECODE = ("models", "muse_spark", "nvidia", "specialized_decode")


def unknown_release() -> str | None:
    """Why the specialized decode cannot run in this vLLM, or None. A known one may carry a build's local label."""
    from importlib import metadata  # not at the top: it is most of what importing the plugin would cost

    try:
        found = metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return "no distribution of the name vllm is installed"
    known = found.partition("+")[0] in KNOWN
    return None if known else f"vLLM {found} is installed, and this jitspark knows {', '.join(KNOWN)}"


def require_known_release() -> None:
    """Raise UsageError, for a deployment that asks for the specialized decode in a vLLM that is not known."""
    unknown = unknown_release()
    if unknown is not None:
        raise UsageError(
            where='additional_config["decode_backend"]',
            found=unknown,
            needed="a vLLM whose hooks are known",
            remedy="Install that vLLM, or another jitspark, or leave decode_backend out.",
        )


def has_own_decode() -> bool:
    """Whether this vLLM brings a specialized decode of Muse Spark itself."""
    from importlib.util import find_spec

    package = find_spec("vllm")
    folders = (package.submodule_search_locations if package is not None else None) or ()
    return any(os.path.isdir(os.path.join(folder, *_OWN_DECODE)) for folder in folders)
