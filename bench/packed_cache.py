"""The cache that a check or a benchmark runs from: a directory, or a tar of one, which is extracted for the run."""

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jitspark.checking.packed import unpack
from jitspark.errors import PackError
from jitspark.registry import load_spec
from jitspark.spec import CONST, Specialization

MANIFEST = "manifest.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--pack", type=Path, metavar="FILE.tar", help="a tar of a cache root, from bin/make-gpu-pack")
    where.add_argument("--cache", type=Path, metavar="DIR", help="a cache root, only read")


@contextlib.contextmanager
def cache_root(options: argparse.Namespace) -> Iterator[Path]:
    """The root that the options name. An extracted one is gone afterwards."""
    if options.cache is not None:
        yield options.cache
        return
    with tempfile.TemporaryDirectory(prefix="jitspark-pack-") as folder:
        yield unpack(options.pack, Path(folder))


def read_manifest(root: Path) -> dict[str, Any]:
    """What bin/make-gpu-pack wrote beside the entries. Raises PackError when it is not there."""
    try:
        manifest: dict[str, Any] = json.loads((root / MANIFEST).read_text())
    except (OSError, ValueError) as problem:
        raise PackError(
            where=str(root / MANIFEST),
            found=str(problem),
            needed="the list of launches that bin/make-gpu-pack writes",
            remedy="Make the pack with bin/make-gpu-pack.",
        ) from None
    return manifest


def specialization_of(launch: Mapping[str, Any]) -> Specialization:
    """What a launch of the manifest runs."""
    spec = load_spec(launch["kernel"])
    consts = {name: size for name, size in launch["axes"].items() if spec.axes[name] is CONST}
    return spec.specialize(axes=consts, dtypes=launch["dtypes"], statics=launch["statics"])
