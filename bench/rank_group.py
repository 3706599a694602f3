"""The ranks of a benchmark: processes of this machine, what torch.distributed gathers from them, and how they end."""

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among them."""

    rank: int
    size: int
    process_group: Any

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """[world, ...] in rank order."""
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.process_group)
        return torch.stack(every)


@contextlib.contextmanager
def started(
    module: str, given: Sequence[str], world: int, stdout: int | None = subprocess.PIPE
) -> Iterator[list[subprocess.Popen[str]]]:
    """A process of `python -m module` for each rank, with these arguments, its `--rank`, and where all of them meet.

    They end with the block at the latest, stopped ones too.
    """
    with tempfile.TemporaryDirectory(prefix="jitspark-ranks-") as folder:
        command = [sys.executable, "-P", "-m", module, *given, "--store", f"{folder}/store"]
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], stdout=stdout, text=True) for rank in range(world)]
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def leave(status: int) -> NoReturn:
    """End this rank with what it has printed, and without the interpreter's own end.

    A thread of torch.distributed that lets go of a tensor meanwhile wants the interpreter, is unwound instead, and
    aborts the process: one time in some hundred.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
