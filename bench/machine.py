"""What a result must say about the machine and the software that it was measured with, and what a bench is asked."""

import argparse
import datetime as dt
import platform
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from jitspark.errors import TargetError
from jitspark.target import target_of_capability


def add_arguments(parser: argparse.ArgumentParser, folder: Path) -> None:
    """How a bench that times CUDA graphs is repeated, and where it puts its result."""
    parser.add_argument("--replays", type=int, default=30, help="timed replays of each graph (default: 30)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: a new one")
    parser.add_argument("--out", type=Path, default=folder, metavar="DIR", help="where the result goes")
    parser.add_argument("--commit", default="", help="what the result says it was measured at")


def leave_on_sigterm() -> None:
    """Let a time limit's SIGTERM end the run as Ctrl-C does, so that what was found by then is still written."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def description(commit: str) -> dict[str, Any]:
    """GPU, driver and versions; `commit` is given because the measuring machine may have no git."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _triton(),
        "python": platform.python_version(),
        "commit": commit,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
    }


def own_target() -> str:
    """The target of the first GPU. Raises TargetError when no kernel supports it, or there is none."""
    if not torch.cuda.is_available():
        raise TargetError(
            where="GPU", found="none that torch can use", needed="a GPU", remedy="Run this on a GPU machine."
        )
    capability = torch.cuda.get_device_capability(0)
    target = target_of_capability(*capability)
    if target is None:
        raise TargetError(
            where="GPU",
            found=f"compute capability {capability[0]}.{capability[1]}",
            needed="a GPU that kernels are compiled for",
            remedy="Run this on a supported GPU.",
        )
    return target


def file_stem(kind: str, about: dict[str, Any]) -> str:
    """A result's file name: what, which GPU, which commit (or the date)."""
    gpu = re.sub(r"[^a-z0-9]+", "-", about["gpu"].lower()).strip("-")
    return f"{kind}_{gpu}_{about['commit'] or about['date']}"


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout else None


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
