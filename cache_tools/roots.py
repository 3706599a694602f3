"""The roots that the settings name: as layers to read, of which none is made, and the one to write to."""

import contextlib
import logging
import os
from pathlib import Path

from jitspark.cache.folders import make_root, root_problem
from jitspark.cache.store import ARTIFACTS, Layer
from jitspark.errors import CacheDirectoryError
from jitspark.settings import Settings

logger = logging.getLogger("jitspark")


def readable_layers(settings: Settings) -> tuple[Layer, ...]:
    """The layers that lookups would read, in their order. A root that does not exist is none; an unsafe one is said."""
    trusted = settings.trust_writable_roots
    named = [Layer(root.absolute(), writable=False, trusted=trusted) for root in settings.cache_path]
    if settings.cache_dir is not None:
        named.append(Layer(settings.cache_dir.absolute(), writable=True, trusted=trusted))
    return tuple(layer for layer in named if _readable(layer))


def _readable(layer: Layer) -> bool:
    if not layer.root.exists():
        return False
    problem = root_problem(layer.root, layer.trusted)
    if problem is not None:
        logger.warning("Cache root %s is not used: %s.", layer.root, problem)
    return problem is None


def readable_root(root: Path, settings: Settings) -> Layer:
    """The layer of a root that somebody named. Raises CacheDirectoryError when it may not be used, or is none.

    A directory of something else, as an image layout, would pass for a cache without a fault.
    """
    root = root.absolute()
    problem = root_problem(root, settings.trust_writable_roots)
    if problem is not None:
        raise _unusable(f"cache directory {root}", problem)
    if _is_something_else(root):
        raise CacheDirectoryError(
            where=f"cache directory {root}",
            found=f"files, and no {ARTIFACTS} among them",
            needed="a cache directory of this version's layout, or a pack",
            remedy="Name the folder that holds it; an image or a wheel has one where it is unpacked or installed.",
        )
    return Layer(root, writable=False, trusted=settings.trust_writable_roots)


def _is_something_else(root: Path) -> bool:
    with contextlib.suppress(OSError):  # whoever reads entries says that it cannot be read
        return not (root / ARTIFACTS).is_dir() and bool(os.listdir(root))
    return False


def writable_layer(settings: Settings) -> Layer:
    """The layer that takes new entries; its root is made if need be. Raises CacheDirectoryError when there is none."""
    if settings.cache_dir is None:
        raise _unusable("JITSPARK_CACHE_DIR", "an empty value")
    root = settings.cache_dir.absolute()
    problem = _unwritable(root) or root_problem(root, settings.trust_writable_roots)
    if problem is not None:
        raise _unusable(f"cache directory {root}", problem)
    return Layer(root, writable=True, trusted=settings.trust_writable_roots)


def _unwritable(root: Path) -> str | None:
    try:
        make_root(root)
    except OSError as problem:
        return problem.strerror or str(problem)
    return None if os.access(root, os.W_OK | os.X_OK) else "no permission to write"


def _unusable(where: str, found: str) -> CacheDirectoryError:
    return CacheDirectoryError(
        where=where,
        found=found,
        needed="a directory that this process can write to and no other user can",
        remedy="Set JITSPARK_CACHE_DIR to one (JITSPARK_TRUST_WRITABLE_ROOTS=1 accepts one that others may write to).",
    )
