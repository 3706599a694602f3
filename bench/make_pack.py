"""`bin/make-gpu-pack`: compile every case and the deployments' specializations, and pack them for a GPU machine.

The pack is a plain tar of a cache root, the same bytes for the same content, plus manifest.json: the launches that
bin/bench-kernels measures, so that the GPU machine needs no geometry library.
"""

import argparse
import io
import json
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.packed_cache import MANIFEST, specialization_of
from bench.parts import launches
from bench.resources import resources
from bench.step_parts import step_parts
from jitspark.building.build import build, wanted_for
from jitspark.building.progress import Event, Wanted
from jitspark.cache.lookup import Lookup
from jitspark.cache.store import ARTIFACTS, Entry
from jitspark.errors import CompileError, JitsparkError
from jitspark.geometry import deployment
from jitspark.registry import kernel_names, load_spec, specializations
from jitspark.settings import Settings, from_environment
from jitspark.spec import Specialization
from jitspark.target import TARGETS

TOKEN_COUNTS = (8, 16, 32, 64)
TINY = (("tiny", 1), ("tiny", 2))


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _run(options)
    except JitsparkError as error:
        print(f"make-gpu-pack: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    measured = [] if options.only == "check" else [(options.geometry, tp) for tp in options.tp]
    listed = [
        launch
        for name, tp in measured
        for launch in launches(name, deployment(name, tp), options.target, TOKEN_COUNTS, options.kernel or None)
    ]
    parts = [] if options.kernel else _parts(options, measured)
    wanted = _each_once(wanted_for(_specializations(options, measured, listed, parts), [options.target]))
    settings = replace(from_environment(), **({"cache_dir": options.cache_dir} if options.cache_dir else {}))
    entries = build_all(wanted, settings)
    took = resources(entries, {item.recipe.digest: item.specialization for item in wanted})
    if not took:
        print("make-gpu-pack: nvdisasm is not installed: the pack does not say what registers its kernels take")
    manifest = {
        "format": 2,
        "target": options.target,
        "launches": listed,
        "parts": parts,
        "resources": took,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_pack(options.out, entries, json.dumps(manifest, indent=1, sort_keys=True).encode())
    print(f"{options.out}: {len(entries)} entries, {len(listed)} launches, {options.out.stat().st_size / 1e6:.1f} MB")
    return 0


def _specializations(
    options: argparse.Namespace,
    measured: Sequence[tuple[str, int]],
    listed: Sequence[Mapping[str, Any]],
    parts: Sequence[Mapping[str, Any]],
) -> list[Specialization]:
    """What is checked, what is measured, or all that deployments ask for besides."""
    if options.only == "check":
        return _cases(options.kernel)
    if options.only == "bench":
        needed = [*listed, *(launch for part in parts for launch in part["launches"].values())]
        return [specialization_of(launch) for launch in needed]
    places = (*measured, *TINY)
    asked = [s for name, tp in places for s in specializations(deployment(name, tp), options.kernel or None)]
    return [*_cases(options.kernel), *asked]


def _parts(options: argparse.Namespace, measured: Sequence[tuple[str, int]]) -> list[dict[str, Any]]:
    return [
        part for name, tp in measured for part in step_parts(name, deployment(name, tp), options.target, TOKEN_COUNTS)
    ]


def _cases(names: Sequence[str]) -> list[Specialization]:
    specs = [load_spec(name) for name in names or kernel_names()]
    return [spec.specialize_case(case) for spec in specs for case in spec.cases]


def _each_once(wanted: Sequence[Wanted]) -> list[Wanted]:
    return list({item.key: item for item in wanted}.values())


def build_all(wanted: Sequence[Wanted], settings: Settings) -> list[Entry]:
    """Every entry. Raises CompileError that names each kernel that failed."""

    def tell(event: Event) -> None:
        if event.kind in ("compiled", "failed"):
            print(f"{event.done}/{event.total} {event.kind} {event.title}", file=sys.stderr)

    report = build(wanted, Lookup(settings), settings, on_event=tell)
    for key, error in report.failed.items():
        print(f"{key}: {error}", file=sys.stderr)
    if report.failed:
        raise CompileError(
            where="pack",
            found=f"{len(report.failed)} of {len(wanted)} kernels that failed to compile",
            needed="all of them",
            remedy="Mend them, or leave kernels out with --kernel.",
            log="\n".join(str(error) for error in report.failed.values()),
        )
    return [report.entries[item.key] for item in wanted]


def write_pack(path: Path, entries: Sequence[Entry], manifest: bytes) -> None:
    """A tar of the entries' files and the manifest, sorted, without times, owners or umask."""
    files = files_of(entries)
    assert all(name.startswith(ARTIFACTS) for name in files)
    write(path, {**files, MANIFEST: manifest})


def files_of(entries: Sequence[Entry]) -> dict[str, bytes]:
    """The entries' files, by their place below the cache's root."""
    files: dict[str, bytes] = {}
    for entry in entries:
        assert entry.directory is not None
        assert entry.layer is not None
        files |= {str(file.relative_to(entry.layer.root)): file.read_bytes() for file in entry.directory.iterdir()}
    return files


def write(path: Path, files: dict[str, bytes]) -> None:
    """A tar, compressed where its name says so, of these files, sorted, without times or owners."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = "w:xz" if path.suffix == ".xz" else "w"
    with tarfile.open(path, mode, format=tarfile.PAX_FORMAT) as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o444
            archive.addfile(member, io.BytesIO(content))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bin/make-gpu-pack", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.tar")
    parser.add_argument("--target", choices=TARGETS, default="sm_90a")
    parser.add_argument("--geometry", default="muse_spark_open")
    parser.add_argument("--tp", type=int, nargs="+", default=[8], help="TP sizes to measure (default: 8)")
    parser.add_argument("--kernel", action="append", default=[], help="only this kernel; may be repeated")
    parser.add_argument("--only", choices=("check", "bench"), help="a smaller pack: what one of the two commands needs")
    parser.add_argument("--cache-dir", type=Path, help="where to compile into (default: the usual cache)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
