"""Failed compiles, remembered for a while, so that every rank fails with one compile and the same error.

Failures lie in the writable root only and are never shipped. A file that cannot be read counts as no failure.
"""

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from jitspark.errors import CompileError, JitsparkError
from jitspark.key import Key, digest_of

# Long enough for all ranks and a few restarts of a deployment; a mended kernel has another key anyway.
REMEMBERED_SECONDS = 600.0
MAX_BYTES = 64 * 1024


def failure_path(root: Path, key: Key, toolchain: str) -> Path:
    """Where the failure of `key` by the toolchain of that digest is recorded."""
    return root / "failures" / f"{digest_of([key.path, toolchain])}.json"


def remember_failure(root: Path, key: Key, toolchain: str, error: CompileError) -> None:
    """Record `error`, best effort: a full disk only means that the next process compiles again."""
    path = failure_path(root, key, toolchain)
    value = {"key": key.path, "toolchain": toolchain, "expires": int(time.time() + REMEMBERED_SECONDS), **error.to_json()}
    staged = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(mode=0o755, exist_ok=True)
        staged.write_text(json.dumps(value))
        os.replace(staged, path)
    except OSError:
        staged.unlink(missing_ok=True)


def remembered_failure(root: Path, key: Key, toolchain: str) -> JitsparkError | None:
    """The failure recorded for `key`, unless it is too old."""
    try:
        with failure_path(root, key, toolchain).open("rb") as stream:
            value: Any = json.loads(stream.read(MAX_BYTES))
        if value["key"] != key.path or value["toolchain"] != toolchain or value["expires"] < time.time():
            return None
        names = ("error", "where", "found", "needed", "remedy", "log")
        return JitsparkError.from_json({name: str(value[name]) for name in names})
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def forget_failure(root: Path, key: Key, toolchain: str) -> None:
    """Remove what is recorded for `key`, so that the next build tries again."""
    failure_path(root, key, toolchain).unlink(missing_ok=True)
