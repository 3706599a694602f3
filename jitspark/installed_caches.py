"""Cache roots that were installed as wheels: every folder `jitspark_cache/<name>` on the module search path.

Found by a look at a few folders, so that lookups start no slower; nothing is imported and no package metadata read.
"""

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path

FOLDER = "jitspark_cache"


def installed_caches(search_path: Iterable[str] | None = None) -> tuple[Path, ...]:
    """The roots, in the order of `search_path` (default: sys.path) and by name. Relative places count for nothing."""
    found: dict[str, None] = {}
    for place in sys.path if search_path is None else search_path:
        if os.path.isabs(place):
            with contextlib.suppress(OSError):
                found.update((f"{place}/{FOLDER}/{name}", None) for name in sorted(os.listdir(f"{place}/{FOLDER}")))
    return tuple(Path(root) for root in found if os.path.isdir(root))
