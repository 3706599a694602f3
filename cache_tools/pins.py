"""Which entries stored plans pin: the `keys` of every plan file, as `<target>-<host>/<kernel>/<recipe>`."""

import json
import logging
import os
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

from jitspark.cache.folders import read_below
from jitspark.cache.store import PLANS, Layer
from jitspark.errors import CacheDirectoryError, EntryError
from jitspark.key import Key

logger = logging.getLogger("jitspark")

MAX_PLAN_BYTES = 16 * 1024 * 1024


def pinned_keys(layers: Iterable[Layer], but: Container[Path] = ()) -> set[Key]:
    """The keys that some stored plan of these layers needs, other than the files `but`.

    A plan that makes no sense pins nothing, and is said. Raises CacheDirectoryError for plans that the system cannot
    read now: what they pin must not go meanwhile.
    """
    names = ((layer, name) for layer in layers for name in plan_names(layer.root))
    return {key for layer, name in names if layer.root / PLANS / name not in but for key in _keys(layer, name)}


def plan_names(root: Path) -> list[str]:
    """The names of a root's plan files, sorted. Raises CacheDirectoryError when the folder cannot be read."""
    try:
        return sorted(name for name in os.listdir(root / PLANS) if name.endswith(".json"))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as problem:
        raise _unreadable(root / PLANS, problem) from problem


def _keys(layer: Layer, name: str) -> set[Key]:
    try:
        return keys_of_plan(read_below(layer.root, (PLANS, name), MAX_PLAN_BYTES, trusted=layer.trusted))
    except FileNotFoundError:
        return set()
    except (EntryError, ValueError) as problem:
        if isinstance(problem.__cause__, OSError):
            raise _unreadable(layer.root / PLANS / name, problem.__cause__) from problem
        logger.warning("Plan %s pins nothing: %s", layer.root / PLANS / name, problem)
        return set()


def _unreadable(path: Path, problem: OSError) -> CacheDirectoryError:
    return CacheDirectoryError(
        where=str(path),
        found=problem.strerror or str(problem),
        needed="stored plans that can be read, to keep what they pin",
        remedy="Mend its permissions or its file system, or remove it.",
    )


def keys_of_plan(content: bytes) -> set[Key]:
    """The keys in a plan file. Raises ValueError for anything that is no list of keys."""
    try:
        plan: Any = json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    keys = plan.get("keys") if isinstance(plan, dict) else None
    if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
        raise ValueError("no list of keys")
    return {_key(text) for text in keys}


def _key(text: str) -> Key:
    parts = text.split("/")
    if len(parts) != 3:
        raise ValueError(f"not a key: {text[:200]!r}")
    target, _, host = parts[0].partition("-")
    return Key(target, host, parts[1], parts[2])
