"""All that jitspark knows of FlashInfer: no other module may import it, and importing this one does not either."""

import importlib.metadata
import importlib.util

DISTRIBUTION = "flashinfer-python"
VERSION = "0.7.2.post1"  # the one whose signatures are known, and that the supported vLLM pins
TARGETS = ("sm_100a", "sm_103a")  # where it has every function that this package would call


def missing() -> str | None:
    """None where FlashInfer can be used, else what is there instead of the known version.

    A property of this process' environment, not of a config: nodes with different images answer differently, so
    ranks still have to agree before they rely on it.
    """
    try:
        found = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "it is not installed"
    if found != VERSION:
        return f"{found} is installed"
    return None if importlib.util.find_spec("flashinfer") else "its package is missing"
