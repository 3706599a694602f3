"""What a kernel's entry says of its arguments, held against the tensors and numbers that a launch would pass.

The entry's record holds the recipe it was compiled from: a launch that agrees with it is one that the kernel can take.
Imports the standard library and specs only; tensors are asked for their shape, dtype, strides, address and device.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jitspark import constraints
from jitspark.cache.record import Record
from jitspark.constraints import Constraint
from jitspark.errors import SpecError
from jitspark.registry import load_spec
from jitspark.spec import Argument, Scalar, Tensor

Value = Any  # a torch tensor, or a number


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a launch cannot pass a value for an argument."""

    argument: str
    found: str
    needed: str


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments of an entry's kernel in call order, its compiled-in sizes and statics, and what it demands of both.

    `args` have dtypes in the place of roles.
    """

    kernel: str
    args: tuple[Argument, ...]
    axes: Mapping[str, int]
    statics: Mapping[str, Any]
    constraints: tuple[Constraint, ...]

    @staticmethod
    def of(record: Record) -> "Signature":
        recipe = record.recipe
        args = tuple(_argument(arg, recipe["dtypes"]) for arg in recipe["spec"]["args"])
        demands = tuple(_constraint(each) for each in recipe["spec"]["constraints"])
        return Signature(record.kernel, args, recipe["axes"], recipe["statics"], demands)

    def problem(self, values: Sequence[Value]) -> Problem | None:
        """The first reason why the kernel cannot be called with these values, in call order, or None."""
        if len(values) != len(self.args):
            return Problem("all", f"{len(values)} arguments", f"{len(self.args)}")
        sizes = dict(self.axes)
        strides: dict[str, int] = {}
        for arg, value in zip(self.args, values, strict=True):
            found = next(_problems(arg, value, sizes, strides), None)
            if found is not None:
                return Problem(arg.name, *found)
        known = {**sizes, **self.statics}
        broken = next((each for each in self.constraints if each.broken(known)), None)
        if broken is None:
            return None
        said = _with_reason(broken, self.kernel).broken(known)
        return Problem("all", str(said), "sizes within the kernel's constraints")


def dtype_name(value: Value) -> str:
    """A tensor's dtype as specs and plans name it."""
    return str(value.dtype).removeprefix("torch.")


def compact_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements; what an axis of size 1 has does not matter, but is fixed here."""
    made = [1]
    for size in reversed(shape[1:]):
        made.append(made[-1] * size)
    return tuple(reversed(made[: len(shape)]))


def as_compact(tensor: Value) -> Value:
    """The same memory, with the strides of its shape where only axes of size 1 differ from them."""
    wanted = compact_strides(tensor.shape)
    if tensor.stride() == wanted or not tensor.is_contiguous():
        return tensor
    return tensor.as_strided(tuple(tensor.shape), wanted)


def _argument(content: Mapping[str, Any], dtypes: Mapping[str, str]) -> Argument:
    fields = {name: tuple(item) if isinstance(item, list) else item for name, item in content.items() if name != "kind"}
    kind = {"Tensor": Tensor, "Scalar": Scalar}[content["kind"]]
    made: Argument = kind(**{**fields, "dtype": dtypes.get(content["dtype"], content["dtype"])})
    return made


def _constraint(content: Mapping[str, Any]) -> Constraint:
    fields = {name: tuple(item) if isinstance(item, list) else item for name, item in content.items() if name != "kind"}
    return constraints.KINDS[content["kind"]](**fields, because="as its spec says")


def _with_reason(constraint: Constraint, kernel: str) -> Constraint:
    """The constraint as the kernel's spec words it: entries hold no reasons, whose wording decides nothing."""
    try:
        declared = load_spec(kernel).constraints
    except SpecError:  # an entry of another version
        return constraint
    return next((each for each in declared if replace(each, because=constraint.because) == constraint), constraint)


def _problems(arg: Argument, value: Value, sizes: dict[str, int], strides: dict[str, int]) -> Iterator[tuple[str, str]]:
    """(found, needed) of what is wrong with one value. Sizes and strides known by name are noted for what follows."""
    is_number = isinstance(value, (int, float))
    if isinstance(arg, Scalar):
        whole = arg.dtype.startswith("int")
        if not is_number or (whole and not isinstance(value, int)):
            yield repr(value) if is_number else "a tensor", f"a number of dtype {arg.dtype}"
        return
    if is_number:
        yield f"the number {value!r}", f"a tensor of dtype {arg.dtype}"
        return
    yield from _tensor_problems(arg, value, sizes, strides)


def _tensor_problems(
    arg: Tensor, value: Value, sizes: dict[str, int], strides: dict[str, int]
) -> Iterator[tuple[str, str]]:
    if dtype_name(value) != arg.dtype:
        yield f"dtype {dtype_name(value)}", f"dtype {arg.dtype}"
    if len(value.shape) != len(arg.axes):
        yield f"shape {list(value.shape)}", f"axes {list(arg.axes)}"
        return
    for axis, size in zip(arg.axes, value.shape, strict=True):
        wanted = sizes.setdefault(axis, size) if isinstance(axis, str) else axis
        if size != wanted:
            yield f"shape {list(value.shape)}", f"{axis} = {wanted} in {list(arg.axes)}"
    yield from _stride_problems(arg, value, strides)
    if value.data_ptr() % arg.align:
        yield f"an address that is {value.data_ptr() % arg.align} modulo {arg.align}", f"a multiple of {arg.align}"


def _stride_problems(arg: Tensor, value: Value, strides: dict[str, int]) -> Iterator[tuple[str, str]]:
    found = tuple(value.stride())
    if arg.role != "in" and any(stride == 0 and size > 1 for stride, size in zip(found, value.shape, strict=True)):
        yield f"strides {list(found)}", "a place of its own for each element that is written"
    declared = compact_strides(value.shape) if arg.strides is None else arg.strides
    for item, stride, size in zip(declared, found, value.shape, strict=True):
        wanted = strides.setdefault(item, stride) if isinstance(item, str) else item
        if stride != wanted and size > 1:
            yield f"strides {list(found)}", f"strides {list(declared)} with {item} = {wanted}"
        if isinstance(item, str) and stride % arg.stride_divisor:
            yield f"strides {list(found)}", f"{item} that is a multiple of {arg.stride_divisor}"
