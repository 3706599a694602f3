"""Failed compiles, remembered for a while, so that every rank fails with one compile and the same error.

Failures lie in the writable root only and are never shipped. A file that cannot be read counts as no failure.
"""

import contextlib
import functools
import json
import os
import re
import time
from pathlib import Path
from typing import Any

from jitspark.cache.folders import make_folder, open_folder, read_below
from jitspark.cache.staging import fresh_name
from jitspark.cache.store import Layer
from jitspark.errors import CompileError, EntryError, JitsparkError
from jitspark.key import Key, digest_of

# Long enough for all ranks and a few restarts of a deployment; a mended kernel has another key anyway.
REMEMBERED_SECONDS = 600.0
MAX_BYTES = 64 * 1024
FAILURES = "failures"


def failure_path(root: Path, key: Key, toolchain: str) -> Path:
    """Where the failure of `key` by the toolchain of that digest is recorded."""
    return root / FAILURES / _name(key, toolchain)


@functools.lru_cache(maxsize=4096)  # waiters ask again and again
def _name(key: Key, toolchain: str) -> str:
    return f"{digest_of([key.path, toolchain])}.json"


def remember_failure(layer: Layer, key: Key, toolchain: str, error: CompileError) -> None:
    """Record `error`, best effort: a full disk only means that the next process compiles again."""
    name = _name(key, toolchain)
    value = {
        "key": key.path,
        "toolchain": toolchain,
        "expires": int(time.time() + REMEMBERED_SECONDS),
        **error.to_json(),
    }
    with contextlib.suppress(OSError, EntryError), contextlib.ExitStack() as stack:
        folder = make_folder(layer.root, (FAILURES,), trusted=layer.trusted)
        stack.callback(os.close, folder)
        staged = f"{name}.{fresh_name()}"
        stack.callback(_unlink, staged, folder)
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump(value, stream)
        os.rename(staged, name, src_dir_fd=folder, dst_dir_fd=folder)


def _unlink(name: str, folder: int) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)


def remembered_failure(layer: Layer, key: Key, toolchain: str) -> JitsparkError | None:
    """The failure recorded for `key`, unless it is too old, or claims to last longer than any does."""
    name = _name(key, toolchain)
    if not os.path.exists(f"{layer.root}/{FAILURES}/{name}"):
        return None
    try:
        value: Any = json.loads(read_below(layer.root, (FAILURES, name), MAX_BYTES, trusted=layer.trusted))
        left = value["expires"] - time.time()
        if (value["key"], value["toolchain"]) != (key.path, toolchain) or not 0 < left <= REMEMBERED_SECONDS:
            return None
        names = ("error", "where", "found", "needed", "remedy", "log")
        return JitsparkError.from_json({name: str(value[name]) for name in names})
    except (OSError, EntryError, ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return None


def forget_failure(layer: Layer, key: Key, toolchain: str) -> None:
    """Remove what is recorded for `key`, so that the next build tries again. Best effort."""
    with contextlib.suppress(OSError):
        failure_path(layer.root, key, toolchain).unlink(missing_ok=True)


def sweep_failures(root: Path, *, dry_run: bool = False) -> list[Path]:
    """Remove failures that are too old to count, and what a killed process left half-written; which ones those are."""
    found = []
    limit = time.time() - REMEMBERED_SECONDS
    with contextlib.suppress(OSError, EntryError), contextlib.ExitStack() as stack:
        folder = open_folder(root, (FAILURES,), trusted=True)  # through no link: what it leads to is not ours
        stack.callback(os.close, folder)
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime < limit:
                    if not dry_run:
                        os.unlink(name, dir_fd=folder)
                    found.append(root / FAILURES / name)
    return found


def clean_log(text: str) -> str:
    """A tool's output without colours and without the directories of this machine."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return re.sub(r"(?<![\w.])/(?:[^\s/:'\"]+/)+", "", text).strip()
