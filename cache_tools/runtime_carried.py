"""The runtime library that a pack carries: the installed one with its licence, or one that a cache root carries."""

from pathlib import Path

from cache_tools.archive import LICENCE, RUNTIME_LIBRARY
from cache_tools.contents import Runtime
from jitspark.cache.folders import is_fit
from jitspark.cache.runtime_library import RUNTIME, RuntimeLibrary, find_runtime_library
from jitspark.cache.store import Layer
from jitspark.errors import PackError
from jitspark.settings import Settings
from jitspark.target import CUDA_FLAVOUR


def runtime_to_carry(settings: Settings) -> Runtime:
    """The runtime library in use, and its licence's text.

    Raises ToolchainError when there is none, PackError when nothing says under which licence it is: it is NVIDIA's, and
    whoever passes it on passes that on too.
    """
    library = find_runtime_library(settings)
    licence = _licence(library)
    if licence is None:
        raise PackError(
            where=str(library.path),
            found="no licence text beside it or in its package",
            needed="the licence that the runtime library is passed on under",
            remedy=f"Put the text into {library.path.parent / LICENCE}, or install the package that it came in.",
        )
    return Runtime(library.flavour, library.path.read_bytes(), licence)


def _licence(library: RuntimeLibrary) -> bytes | None:
    from importlib.metadata import PackageNotFoundError, files

    beside = library.path.parent / LICENCE
    if beside.is_file():
        return beside.read_bytes()
    try:
        listed = files(f"nvidia-cutlass-dsl-libs-{library.flavour}") or []
    except PackageNotFoundError:
        return None
    located = [Path(str(file.locate())) for file in listed if ".dist-info/licenses/" in str(file)]
    return b"\n".join(path.read_bytes() for path in sorted(located)) or None


def carried_runtime(layer: Layer) -> Runtime | None:
    """The runtime library in a cache root, for the flavour that artifacts are built against."""
    folder = layer.root / RUNTIME / CUDA_FLAVOUR
    library, licence = folder / RUNTIME_LIBRARY, folder / LICENCE
    if not is_fit(layer.root, (RUNTIME, CUDA_FLAVOUR), RUNTIME_LIBRARY, trusted=layer.trusted):
        return None
    return Runtime(CUDA_FLAVOUR, library.read_bytes(), licence.read_bytes() if licence.is_file() else b"")
