"""From options to the keys that they mean."""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jitspark.errors import TargetError, UsageError
from jitspark.target import DEFAULT_TARGET, check_target

if TYPE_CHECKING:  # what has to import specs is imported where it is used: other commands start without it
    from jitspark.building.progress import Wanted


@dataclass(frozen=True, slots=True)
class Selection:
    """What a command is about. `kernels` is empty for all of them."""

    tp: tuple[int, ...]
    targets: tuple[str, ...]
    geometry: str
    kernels: tuple[str, ...] = ()

    def warm_command(self) -> str:
        """The command that makes every entry of this selection."""
        words = ["jitspark", "warm", "--tp", ",".join(map(str, self.tp)), "--target", ",".join(self.targets)]
        words += ["--geometry", self.geometry]
        return shlex.join([*words, *(word for kernel in self.kernels for word in ("--kernel", kernel))])


def parse_tp(text: str) -> tuple[int, ...]:
    """The TP sizes in `8` or `8,16`, each once. Raises UsageError."""
    items = [item.strip() for item in text.split(",")]
    if not all(item.isascii() and item.isdigit() and 0 < int(item) <= 4096 for item in items):
        raise UsageError(where="--tp", found=repr(text), needed="TP sizes such as 8 or 8,16", remedy="Correct --tp.")
    return tuple(dict.fromkeys(int(item) for item in items))


def parse_targets(text: str, say: Callable[[str], None]) -> tuple[str, ...]:
    """The targets in `text`; without any, those of this machine's GPUs, else the default, and `say` tells which."""
    if text:
        return tuple(dict.fromkeys(check_target(item.strip()) for item in text.split(",")))
    from jitspark.gpus import find_gpus, targets_of

    machine = find_gpus()
    found = targets_of(machine.gpus)
    names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
    if found:
        say(f"target {', '.join(found)}: the GPUs found here ({names}); --target chooses others")
        return found
    why = f"no kernel supports the GPUs found here ({names})" if machine.gpus else "no GPU found here"
    say(f"target {DEFAULT_TARGET}: {why}; --target chooses others")
    return (DEFAULT_TARGET,)


def wanted_by(selection: Selection) -> "list[Wanted]":
    """Each key that these deployments ask for, once, though TP sizes share some.

    Raises GeometryError, SpecError and TargetError.
    """
    from jitspark.building.build import wanted_for
    from jitspark.geometry import deployment
    from jitspark.registry import specializations

    names = selection.kernels or None
    found = (specializations(deployment(selection.geometry, tp), names) for tp in selection.tp)
    wanted = wanted_for([each for some in found for each in some], selection.targets)
    if not wanted:
        raise TargetError(
            where=f"kernel {', '.join(selection.kernels)}" if selection.kernels else "kernel_specs",
            found=f"nothing for {', '.join(selection.targets)}",
            needed="a kernel that supports the target and serves the geometry",
            remedy="Choose other targets or kernels; `targets` in a kernel's spec.py says what it supports.",
        )
    return unique(wanted)


def unique(wanted: "Sequence[Wanted]") -> "list[Wanted]":
    return list({item.key: item for item in wanted}.values())
