"""What an entry is for: GPU architectures, the CUDA flavour, and the host."""

import functools
import os
import re

from jitspark.errors import TargetError

# The decode step's deployments are Blackwell; Hopper is where numerics and speed are measured.
TARGETS = ("sm_90a", "sm_100a", "sm_103a")
DEFAULT_TARGET = "sm_100a"
# The flavour whose compiler and runtime library are used, whatever driver is installed: vLLM 0.33.0 pins cu13.
CUDA_FLAVOUR = "cu13"


def check_target(name: str) -> str:
    """`name` if it is a known target; raises TargetError otherwise."""
    if name not in TARGETS:
        raise TargetError(
            where="--target",
            found=repr(name),
            needed=f"one of {', '.join(TARGETS)}",
            remedy="Name a supported target, or leave --target out to use the GPUs of this machine.",
        )
    return name


def target_of_capability(major: int, minor: int) -> str | None:
    """The target for a device of this compute capability, or None when no kernel supports it."""
    name = f"sm_{major}{minor}a"
    return name if name in TARGETS else None


@functools.cache
def host_name() -> str:
    """The host an artifact built here is for, e.g. `x86_64-linux`: its host code is native code."""
    system = os.uname()
    machine = re.sub(r"[^a-z0-9_]", "_", system.machine.lower())
    return f"{machine}-{system.sysname.lower()}"
