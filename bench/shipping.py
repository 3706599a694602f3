"""Sizes and times of carrying a cache: `python -m bench.shipping --tp 8 --target sm_90a,sm_100a,sm_103a`.

The cache is the one in use, warmed before. Each figure is the best of three processes: wall, processor time, and MB/s
of what is packed or unpacked.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from bench import cpu

ROOT = Path(__file__).resolve().parents[1]
RUNS = 3


def main() -> int:
    options = _parser().parse_args()
    about = {**cpu.description(), "tp": options.tp, "target": options.target}
    rows = []
    with tempfile.TemporaryDirectory(prefix="jitspark-shipping-", dir=options.folder) as name:
        folder = Path(name)
        _keys(folder)
        print(f"load {about['load_average'][0]}, {about['cores']} cores")
        print(f"{'':<44} {'bytes':>11} {'seconds':>8} {'cpu s':>6} {'MB/s':>6}")
        for title, words, made in _verbs(["--tp", options.tp, "--target", options.target]):
            wall, used = min(_run(words, folder, made) for _ in range(RUNS))
            size, content = _size(folder / made), _content(folder, with_runtime="runtime" in title)
            print(f"{title:<44} {size:>11,} {wall:>8.2f} {used:>6.2f} {content / 1e6 / wall:>6.1f}")
            rows += [{"what": title, "bytes": size, "wall_s": wall, "processor_s": used, "content_bytes": content}]
    if options.json is not None:
        options.json.write_text(json.dumps({"about": about, "best_of": RUNS, "steps": rows}, indent=1) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.shipping", description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", default="8")
    parser.add_argument("--target", default="sm_90a,sm_100a,sm_103a")
    parser.add_argument("--folder", help="a folder on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there, too")
    return parser


def _keys(folder: Path) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    from pack_fixtures import make_keys

    make_keys(folder)


def _verbs(chosen: list[str]) -> Iterator[tuple[str, list[str], str]]:
    """A title, the words of a command, and what it makes; later ones read what earlier ones made."""
    sign, trust = ["--sign", "key.pem"], ["--trust", "key.pub"]
    # the first is what all sizes of content are taken from
    yield "directory", ["pack", "layer", *chosen, "--format", "dir"], "layer"
    yield (
        "directory, with the runtime library",
        ["pack", "whole", *chosen, "--format", "dir", "--with-runtime"],
        "whole",
    )
    yield "pack", ["pack", "a", *chosen], "a"
    yield "pack, signed", ["pack", "b", *chosen, *sign], "b"
    yield "pack, signed, with the runtime library", ["pack", "c", *chosen, *sign, "--with-runtime"], "c"
    yield "OCI layer", ["pack", "d", *chosen, "--format", "oci"], "d"
    yield "OCI layer, with the runtime library", ["pack", "e", *chosen, "--format", "oci", "--with-runtime"], "e"
    yield "wheel", ["pack", "wheels", *chosen, "--format", "wheel"], "wheels"
    yield "unpack", ["unpack", "a", "--allow-unsigned", "--other-machine"], "there"
    yield "unpack, signed", ["unpack", "b", *trust, "--other-machine"], "there"
    yield "unpack, signed, with the runtime library", ["unpack", "c", *trust, "--other-machine"], "there"
    yield "verify a signed pack", ["verify", "b", *trust], "b"
    yield "merge of two", ["merge", "m", "a", "b", "--allow-unsigned"], "m"


def _run(words: list[str], folder: Path, made: str) -> tuple[float, float]:
    if words[0] != "verify":  # from nothing each time
        shutil.rmtree(folder / made, ignore_errors=True)
        (folder / made).unlink(missing_ok=True)
    if made == "wheels":
        (folder / made).mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if made == "there":
        environment["JITSPARK_CACHE_DIR"] = str(folder / made)
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jitspark", *words], env=environment, cwd=folder, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(words)}: status {process.returncode}")
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _content(folder: Path, *, with_runtime: bool) -> int:
    """What is carried, as files."""
    return _size(folder / ("whole" if with_runtime and (folder / "whole").exists() else "layer"))


if __name__ == "__main__":
    sys.exit(main())
