"""What a spec demands of its sizes, as values that can be printed, hashed and compared, each with its reason.

A constraint speaks of an axis or a static by name and is not checked until that name has a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Divisible:
    """`name` (an axis or a static) is a multiple of `by` (a number, or another axis' or static's name)."""

    name: str
    by: int | str
    because: str

    def broken(self, values: Mapping[str, Any]) -> str | None:
        by = _resolve(self.by, values)
        if by is None or self.name not in values or (by != 0 and values[self.name] % by == 0):
            return None
        return f"{self.name}={values[self.name]} is not divisible by {by} ({self.because})"


@dataclass(frozen=True, slots=True)
class AtMost:
    """`name` is at most `bound` (a number, or another axis' or static's name)."""

    name: str
    bound: int | str
    because: str

    def broken(self, values: Mapping[str, Any]) -> str | None:
        bound = _resolve(self.bound, values)
        if bound is None or self.name not in values or values[self.name] <= bound:
            return None
        return f"{self.name}={values[self.name]} is more than {bound} ({self.because})"


@dataclass(frozen=True, slots=True)
class AtLeast:
    """`name` is at least `bound` (a number, or another axis' or static's name)."""

    name: str
    bound: int | str
    because: str

    def broken(self, values: Mapping[str, Any]) -> str | None:
        bound = _resolve(self.bound, values)
        if bound is None or self.name not in values or values[self.name] >= bound:
            return None
        return f"{self.name}={values[self.name]} is less than {bound} ({self.because})"


Constraint = Divisible | AtMost | AtLeast


def _resolve(bound: int | str, values: Mapping[str, Any]) -> Any:
    """A bound given as a name is unknown, hence not checked, until that name has a value."""
    return bound if isinstance(bound, int) else values.get(bound)
