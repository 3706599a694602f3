"""Kernels out of a cache that was built elsewhere: found, verified and loaded, never compiled.

Needs the standard library, apache-tvm-ffi and the runtime library of the CuTe DSL.
"""

import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jitspark.cache.folders import FOLDER_MODE, root_problem
from jitspark.cache.loader import Kernel, Loader
from jitspark.cache.lookup import Lookup, Roots
from jitspark.cache.store import Layer
from jitspark.errors import CacheDirectoryError, MissingEntriesError, PackError
from jitspark.key import Key, recipe_of
from jitspark.settings import from_environment
from jitspark.spec import Specialization

Kernels = dict[Key, Kernel]


def unpack(pack: Path, folder: Path) -> Path:
    """Extract the tar of a cache root into `folder`, and return it. Raises PackError for anything else."""
    try:
        with tarfile.open(pack) as archive:
            archive.extractall(folder, filter="data")
        for path in folder.rglob("*"):
            if path.is_dir():
                path.chmod(FOLDER_MODE)  # whatever the umask: a folder that others may write to is not read from
    except (OSError, tarfile.TarError) as problem:
        raise PackError(
            where=str(pack),
            found=f"{type(problem).__name__}: {problem}",
            needed="a tar of a cache root",
            remedy="Make it again with bin/make-gpu-pack.",
        ) from None
    return folder


def load_kernels(root: Path, specializations: Sequence[Specialization], target: str) -> Kernels:
    """The kernels of `specializations` from the read-only cache root `root`. Raises what `load_keys` raises."""
    return load_keys(root, [recipe_of(each, target).key for each in specializations])


def load_keys(root: Path, keys: Sequence[Key]) -> Kernels:
    """The kernels of `keys` from the read-only cache root `root`, each once.

    Raises MissingEntriesError that names every entry that is not there, CacheDirectoryError for an unusable root,
    and what `Loader.load` raises.
    """
    problem = root_problem(root, trust_writable=False)
    if problem is not None:
        raise CacheDirectoryError(
            where=str(root), found=problem, needed="a cache root of this user's or root's", remedy="Unpack it again."
        )
    settings = replace(from_environment(), cache_dir=None, cache_path=(root,), compile="never")
    lookup = Lookup(settings, Roots((Layer(root, writable=False),), None))
    keys = list(dict.fromkeys(keys))
    found = {key: lookup.find(key) for key in keys}
    missing = [str(key) for key, entry in found.items() if entry is None]
    if missing:
        raise MissingEntriesError(
            where=str(root),
            found=f"{len(missing)} missing: {', '.join(missing)}",
            needed="an entry for every key, built from these very sources",
            remedy="Make the pack again with bin/make-gpu-pack, from this checkout.",
            keys=tuple(missing),
        )
    entries = [entry for entry in found.values() if entry is not None]
    return dict(zip(keys, Loader(settings).load(entries), strict=True))
