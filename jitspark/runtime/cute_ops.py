"""The catalogue of our kernels, as the plans of the decode step and of the draft call them.

An operation is a kernel's name and its arguments in call order. A plan's launch names one, with the key of our kernel
or with a provider that serves it instead. What it computes, to the rounding, is in its `kernel_specs/<name>/spec.py`,
and so is all that this module knows. Importing it imports neither torch nor the compiler.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from jitspark.plans.plan import Launch
from jitspark.registry import kernel_names, load_spec
from jitspark.spec import Argument, Static


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel of ours as it is called.

    arguments: in order; those with a `when` exist only where that static has that value. statics: what each may be.
    early_reads: what it reads before it waits for the launch before it, so that it must be complete by then.
    """

    name: str
    arguments: tuple[Argument, ...]
    statics: Mapping[str, tuple[Static, ...]]
    early_reads: tuple[str, ...]

    def arguments_of(self, launch: Launch) -> tuple[Argument, ...]:
        """The arguments that there are with a launch's statics."""
        return tuple(arg for arg in self.arguments if arg.when is None or launch.statics[arg.when[0]] == arg.when[1])


@cache
def operation(name: str) -> Operation:
    """Raises SpecError for a name that is none of our kernels'."""
    spec = load_spec(name)
    return Operation(name, spec.args, spec.statics, spec.early_reads)


def operations() -> tuple[Operation, ...]:
    """All of them, by name."""
    return tuple(operation(name) for name in kernel_names())
