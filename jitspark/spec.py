"""The vocabulary that declares a kernel: axes, dtypes by role, statics, arguments, constraints, cases.

Everything here is a frozen value and imports neither torch nor the compiler. A `KernelSpec` says what a
kernel is for all sizes; a `Specialization` is the spec with its CONST axes, dtypes and statics chosen,
which is what gets compiled.
"""

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jitspark.constraints import AtLeast, AtMost, Constraint, Divisible, Equals, OneOf, names_in
from jitspark.errors import SpecError

__all__ = [
    "CONST", "DTYPE_BYTES", "VAR", "Argument", "AtLeast", "AtMost", "AxisKind", "Case", "Constraint", "Divisible",
    "Equals", "KernelSpec", "OneOf", "Scalar", "Specialization", "Static", "Tensor",
]  # fmt: skip

DTYPE_BYTES = MappingProxyType(
    {
        "bfloat16": 2,
        "float16": 2,
        "float32": 4,
        "int32": 4,
        "int64": 8,
        "uint8": 1,
        "float8_e4m3fn": 1,
        "bool": 1,
    }
)

Static = bool | int | float | str


class AxisKind(enum.Enum):
    """VAR: known at run time, enters no key. CONST: compiled in."""

    VAR = "var"
    CONST = "const"


VAR = AxisKind.VAR
CONST = AxisKind.CONST


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor argument.

    `axes` are axis names or literal sizes, outermost first. `dtype` is a dtype role of the spec, or a dtype's
    own name. `role` is in, out, inout, or state: the kernel's own memory from launch to launch, zero before the
    first, whose content means nothing to anybody else. `strides` is None for a compact row-major tensor; otherwise
    one item per axis: an int, or a name for a stride known at run time (in elements, 64 bit; it must be a multiple of
    `stride_divisor`). `align` is the alignment in bytes that the base pointer must have. `when=(static, value)`: the
    argument exists only in specializations where that static has that value.
    """

    name: str
    axes: tuple[str | int, ...]
    dtype: str
    role: str = "in"
    strides: tuple[str | int, ...] | None = None
    stride_divisor: int = 1
    align: int = 16
    when: tuple[str, Static] | None = None


@dataclass(frozen=True, slots=True)
class Scalar:
    """A scalar argument, passed by value: float32, int32 or int64."""

    name: str
    dtype: str
    when: tuple[str, Static] | None = None


Argument = Tensor | Scalar


@dataclass(frozen=True, slots=True)
class Case:
    """One correctness case: a value for every axis (VAR too), every dtype role and every static.

    A written value `got` passes when |got - want| <= atol + rtol * |want| against the float64 reference;
    integer and quantized outputs must be equal. `tolerances` holds (rtol, atol) of the arguments that are held to
    other bounds: an FP32 output beside BF16 ones.
    """

    axes: Mapping[str, int]
    dtypes: Mapping[str, str]
    statics: Mapping[str, Static]
    rtol: float
    atol: float
    note: str = ""
    tolerances: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def tolerance_of(self, argument: str) -> tuple[float, float]:
        """(rtol, atol) for one written argument."""
        return self.tolerances.get(argument, (self.rtol, self.atol))


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """A kernel for all its sizes. See ARCHITECTURE.md, "Spec".

    `instructions` are SASS mnemonics that its machine code must hold on every target (a test disassembles it).

    What a plan must know of a launch, besides its arguments: `early_reads` are the arguments that it reads before it
    waits for the launch before; `triggers_early` says that it lets the next launch begin before it has waited itself;
    `early_writes` are outputs that every later launch sees, as they are complete before it lets the next one begin;
    `partial_outputs` are arguments of which it reads nothing and writes a part.

    None of these, nor the cases, the reference and the list of targets decide a byte of an artifact or enter a key.
    """

    name: str
    axes: Mapping[str, AxisKind]
    dtypes: Mapping[str, tuple[str, ...]]
    statics: Mapping[str, tuple[Static, ...]]
    args: tuple[Argument, ...]
    constraints: tuple[Constraint, ...]
    targets: tuple[str, ...]
    kernel: str
    reference: str
    cases: tuple[Case, ...] = field(default=(), compare=False)
    instructions: tuple[str, ...] = field(default=(), compare=False)
    early_reads: tuple[str, ...] = field(default=(), compare=False)
    triggers_early: bool = field(default=False, compare=False)
    early_writes: tuple[str, ...] = field(default=(), compare=False)
    partial_outputs: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        for name in ("axes", "dtypes", "statics"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        _check_declaration(self)

    def specialize(
        self, *, axes: Mapping[str, int], dtypes: Mapping[str, str] | None = None, statics: Mapping[str, Static]
    ) -> "Specialization":
        """Choose every CONST axis, dtype role and static.

        VAR axes in `axes` are ignored. A role with a single choice may be left out of `dtypes`.
        Raises SpecError when a name is unknown or missing, a choice is not offered, or a constraint breaks.
        """
        known = {name for name, kind in self.axes.items() if kind is CONST}
        chosen = {name: size for name, size in axes.items() if self.axes.get(name) is not VAR}
        roles = {role: choices[0] for role, choices in self.dtypes.items() if len(choices) == 1}
        roles |= dict(dtypes or {})
        _require_names(self.name, "axis", known, chosen)
        _require_sizes(self.name, chosen)
        _require_choices(self.name, "dtype role", self.dtypes, roles)
        _require_choices(self.name, "static", self.statics, statics)
        made = Specialization(self, chosen, roles, dict(statics))
        made.check({})
        return made

    def specialize_case(self, case: Case) -> "Specialization":
        made = self.specialize(axes=case.axes, dtypes=case.dtypes, statics=case.statics)
        made.check(case.axes)
        return made


@dataclass(frozen=True, slots=True)
class Specialization:
    """A spec with its CONST axes, dtypes and statics chosen: one artifact per target and host."""

    spec: KernelSpec
    axes: Mapping[str, int]
    dtypes: Mapping[str, str]
    statics: Mapping[str, Static]

    def __post_init__(self) -> None:
        for name in ("axes", "dtypes", "statics"):
            object.__setattr__(self, name, MappingProxyType(dict(sorted(getattr(self, name).items()))))

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def args(self) -> tuple[Argument, ...]:
        """The arguments that exist in this specialization, in call order."""
        return tuple(arg for arg in self.spec.args if arg.when is None or self.statics[arg.when[0]] == arg.when[1])

    def factory_arguments(self) -> dict[str, Static]:
        """What the kernel factory is called with: consts, statics, and the dtype roles that offer a choice."""
        roles = {role: dtype for role, dtype in self.dtypes.items() if len(self.spec.dtypes[role]) > 1}
        return {**self.axes, **self.statics, **roles}

    def dtype_of(self, arg: Argument) -> str:
        return self.dtypes.get(arg.dtype, arg.dtype)

    def check(self, var_axes: Mapping[str, int]) -> None:
        """Raise SpecError for the first constraint that these sizes break (VAR axes without a value are skipped)."""
        values = {**var_axes, **self.axes, **self.statics}
        broken = next((text for c in self.spec.constraints if (text := c.broken(values))), None)
        if broken is not None:
            raise SpecError(
                where=self.name,
                found=broken,
                needed="sizes within the spec's constraints",
                remedy=f"See kernel_specs/{self.name}/spec.py for what it serves.",
            )

    def title(self) -> str:
        """A short text for logs and tables: the kernel and what was chosen."""
        chosen = {**self.axes, **{r: d for r, d in self.dtypes.items() if len(self.spec.dtypes[r]) > 1}, **self.statics}
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in chosen.items())})"


def _check_declaration(spec: KernelSpec) -> None:
    names = [*spec.axes, *spec.statics, *spec.dtypes]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        needed = "axes, dtype roles and statics with names of their own"
        raise _declaration_error(spec, f"the name {repeated[0]!r} twice", needed)
    for problem in _argument_problems(spec):
        raise _declaration_error(spec, problem, "arguments made of the spec's own axes, dtypes and statics")
    for constraint in spec.constraints:
        unknown = [name for name in names_in(constraint) if name not in spec.axes and name not in spec.statics]
        if unknown:
            found = f"a constraint on {constraint.name} with the unknown name {unknown[0]!r}"
            raise _declaration_error(spec, found, "constraints on the spec's own axes and statics")


def _argument_problems(spec: KernelSpec) -> Iterator[str]:
    for arg in spec.args:
        if arg.dtype not in spec.dtypes and arg.dtype not in DTYPE_BYTES:
            yield f"argument {arg.name} of unknown dtype or role {arg.dtype!r}"
        if arg.when is not None and arg.when[0] not in spec.statics:
            yield f"argument {arg.name} that depends on an unknown static {arg.when[0]!r}"
        if isinstance(arg, Tensor):
            yield from _tensor_problems(spec, arg)
    names = {arg.name: arg for arg in spec.args if isinstance(arg, Tensor)}
    for name in (*spec.early_reads, *spec.early_writes, *spec.partial_outputs):
        if name not in names or (name not in spec.early_reads and names[name].role == "in"):
            yield f"early_reads, early_writes or partial_outputs {name!r}"
    if spec.triggers_early and spec.early_writes:
        yield f"early_writes {spec.early_writes[0]!r} of a kernel that triggers early"


def _tensor_problems(spec: KernelSpec, arg: Tensor) -> Iterator[str]:
    unknown = [axis for axis in arg.axes if isinstance(axis, str) and axis not in spec.axes]
    if unknown:
        yield f"argument {arg.name} with unknown axis {unknown[0]!r}"
    if arg.role not in ("in", "out", "inout", "state"):
        yield f"argument {arg.name} with role {arg.role!r}"
    if arg.strides is not None and len(arg.strides) != len(arg.axes):
        yield f"argument {arg.name} with {len(arg.strides)} strides for {len(arg.axes)} axes"


def _declaration_error(spec: KernelSpec, found: str, needed: str) -> SpecError:
    return SpecError(where=spec.name, found=found, needed=needed, remedy=f"Mend kernel_specs/{spec.name}/spec.py.")


def _require_names(where: str, what: str, known: set[str], chosen: Mapping[str, object]) -> None:
    wrong = sorted(set(chosen) ^ known)
    if wrong:
        state = "unknown" if wrong[0] in chosen else "missing"
        raise SpecError(
            where=where,
            found=f"{state} {what} {wrong[0]!r}",
            needed=f"exactly {', '.join(sorted(known)) or 'none'}",
            remedy=f"See kernel_specs/{where}/spec.py.",
        )


def _require_sizes(where: str, chosen: Mapping[str, object]) -> None:
    for name, size in chosen.items():
        if type(size) is not int or size < 1:
            raise SpecError(
                where=where,
                found=f"axis {name}={size!r}",
                needed="a whole number of at least 1",
                remedy=f"See kernel_specs/{where}/spec.py.",
            )


def _require_choices(
    where: str, what: str, offered: Mapping[str, tuple[Any, ...]], chosen: Mapping[str, object]
) -> None:
    _require_names(where, what, set(offered), chosen)
    for name, value in chosen.items():
        # type(...) too: 1, 1.0 and True are equal in Python but compile to different kernels
        if not any(type(value) is type(choice) and value == choice for choice in offered[name]):
            raise SpecError(
                where=where,
                found=f"{what} {name}={value!r}",
                needed=f"one of {', '.join(map(repr, offered[name]))}",
                remedy=f"See kernel_specs/{where}/spec.py.",
            )
