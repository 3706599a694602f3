"""Random arguments for a specialization, laid out in guarded memory."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeAlias

import torch
from torch import Tensor as TorchTensor

from jitspark.checking.guarded import Guarded, guarded
from jitspark.errors import SpecError
from jitspark.registry import resolve
from jitspark.spec import Scalar, Specialization, Tensor

Value: TypeAlias = TorchTensor | float | int
Draw: TypeAlias = Mapping[str, Value]  # by argument; outputs and states have no value
UNDRAWN = ("out", "state")


@dataclass(frozen=True, slots=True)
class Arguments:
    """Memory for calls: every tensor of the specialization inside guard bands, and its scalars."""

    specialization: Specialization
    tensors: Mapping[str, Guarded]
    scalars: Mapping[str, float | int]
    addresses: Mapping[str, TorchTensor] = field(default_factory=dict)
    kept: Sequence[TorchTensor] = ()

    def values(self) -> list[Value]:
        """What the kernel is called with, in call order."""
        return [
            self.tensors[arg.name].tensor if isinstance(arg, Tensor) else self.scalars[arg.name]
            for arg in self.specialization.args
        ]

    def fill(self, draw: Draw) -> None:
        """Set inputs from `draw` in place and poison every output, as before a first call; a state stays as it is."""
        for arg in tensor_args(self.specialization):
            if arg.role == "out":
                self.tensors[arg.name].poison()
            elif arg.role != "state":
                self.tensors[arg.name].tensor.copy_(self.drawn(arg.name, draw))

    def drawn(self, name: str, draw: Draw) -> TorchTensor:
        """What `fill` puts into an input."""
        value = self.addresses.get(name, draw[name])
        assert isinstance(value, TorchTensor)
        return value

    def snapshot(self, roles: Sequence[str]) -> dict[str, TorchTensor]:
        """Copies of the tensors that have one of these roles."""
        chosen = (arg.name for arg in tensor_args(self.specialization) if arg.role in roles)
        return {name: self.tensors[name].tensor.clone() for name in chosen}


def tensor_args(specialization: Specialization) -> list[Tensor]:
    return [arg for arg in specialization.args if isinstance(arg, Tensor)]


def reference_module(specialization: Specialization) -> ModuleType:
    module, _ = resolve(specialization.name, specialization.spec.reference)
    return importlib.import_module(module)


def reference_function(specialization: Specialization) -> Callable[..., None]:
    _, function = resolve(specialization.name, specialization.spec.reference)
    made: Callable[..., None] = getattr(reference_module(specialization), function)
    return made


def draw_arguments(specialization: Specialization, axes: Mapping[str, int], generator: torch.Generator) -> Draw:
    """Fresh inputs on the generator's device: the reference's own where it makes them, else standard normal.

    `axes` has every axis, VAR ones too. Raises SpecError for an input that neither serves.
    """
    own = getattr(reference_module(specialization), "random_arguments", None)
    drawn = dict(own(specialization, axes, generator)) if own else {}
    for arg in specialization.args:
        if isinstance(arg, Scalar):
            _require(arg.name in drawn, specialization, f"no value for the scalar {arg.name}")
        elif arg.role not in UNDRAWN:
            if arg.name not in drawn:
                drawn[arg.name] = _normal(specialization, arg, axes, generator)
            _check_drawn(specialization, arg, axes, drawn[arg.name])
    return drawn


def allocate(specialization: Specialization, axes: Mapping[str, int], draw: Draw, device: torch.device) -> Arguments:
    """Guarded memory for calls; states are zero. Strides that are known only at run time leave gaps between rows."""
    strides: dict[str, int] = {}
    tensors = {
        arg.name: guarded(
            shape_of(specialization, arg, axes),
            _strides(arg, shape_of(specialization, arg, axes), draw.get(arg.name), strides),
            torch_dtype(specialization, arg),
            arg.align,
            device,
        )
        for arg in tensor_args(specialization)
    }
    for arg in tensor_args(specialization):
        if arg.role == "state":
            tensors[arg.name].tensor.zero_()
    scalars = {arg.name: draw[arg.name] for arg in specialization.args if isinstance(arg, Scalar)}
    wire = getattr(reference_module(specialization), "wire", None)
    wired = wire({name: each.tensor for name, each in tensors.items()}, **scalars) if wire else ({}, ())
    return Arguments(specialization, tensors, scalars, *wired)


def shape_of(specialization: Specialization, arg: Tensor, axes: Mapping[str, int]) -> tuple[int, ...]:
    sizes = {**axes, **specialization.axes}
    return tuple(sizes[axis] if isinstance(axis, str) else axis for axis in arg.axes)


def torch_dtype(specialization: Specialization, arg: Tensor) -> torch.dtype:
    made: torch.dtype = getattr(torch, specialization.dtype_of(arg))
    return made


def _normal(
    specialization: Specialization, arg: Tensor, axes: Mapping[str, int], generator: torch.Generator
) -> TorchTensor:
    dtype = torch_dtype(specialization, arg)
    _require(dtype.is_floating_point, specialization, f"no random values for {arg.name}")
    shape = shape_of(specialization, arg, axes)
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def _check_drawn(specialization: Specialization, arg: Tensor, axes: Mapping[str, int], value: Value) -> None:
    wanted = (shape_of(specialization, arg, axes), torch_dtype(specialization, arg))
    found = (tuple(value.shape), value.dtype) if isinstance(value, TorchTensor) else type(value)
    _require(found == wanted, specialization, f"{found} drawn for {arg.name}, which is {wanted}")


def _strides(arg: Tensor, shape: Sequence[int], drawn: Value | None, named: dict[str, int]) -> tuple[int, ...]:
    """Strides in the drawn tensor's order of dimensions. Those with a name get a gap; equal names get equal strides."""
    like = drawn.stride() if isinstance(drawn, TorchTensor) else tuple(range(len(shape), 0, -1))
    declared = arg.strides or (None,) * len(shape)
    order = range(len(shape)) if arg.strides is None else sorted(range(len(shape)), key=lambda d: (-like[d], d))
    made = [0] * len(shape)
    reach = 1
    for dim in reversed(order):
        item = declared[dim]
        if isinstance(item, str):
            divisor = arg.stride_divisor
            made[dim] = named.setdefault(item, (-(-reach // divisor) + 1) * divisor)
        else:
            made[dim] = reach if item is None else item
        reach = max(reach, made[dim] * shape[dim])
    return tuple(made)


def _require(fine: bool, specialization: Specialization, found: str) -> None:  # noqa: FBT001 - a condition
    if not fine:
        raise SpecError(
            where=f"{specialization.name}: random arguments",
            found=found,
            needed="inputs of the declared shapes and dtypes",
            remedy=f"Mend random_arguments in kernel_specs/{specialization.name}/reference.py.",
        )
