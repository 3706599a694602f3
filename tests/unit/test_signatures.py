"""Every kernel's signature takes what its cases pass, and refuses each argument that is off in one way, with a reason.

Generic over all specs: nothing is launched, and values are stand-ins that have what a tensor is asked for.
"""

import functools
from dataclasses import dataclass, replace

import pytest

from jitspark.cache.record import Record
from jitspark.errors import SpecError
from jitspark.key import recipe_of
from jitspark.plans.launch_signature import Signature, compact_strides
from jitspark.registry import kernel_names, load_spec
from jitspark.spec import CONST, DTYPE_BYTES, VAR, AtLeast, AtMost, Scalar, Tensor

TARGET = "sm_90a"
ADDRESS = 1 << 20


@dataclass(frozen=True, slots=True)
class Value:
    """What a signature asks a tensor for."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    address: int = ADDRESS

    def stride(self):
        return self.strides

    def data_ptr(self):
        return self.address


def cases_of(name):
    """Cases of a spec that have between them all arguments that any case has."""
    spec, chosen, seen = load_spec(name), [], set()
    for case in spec.cases:
        found = {arg.name for arg in spec.specialize_case(case).args}
        if not found <= seen:
            seen |= found
            chosen.append(case)
    return chosen


CASES = [(name, index) for name in kernel_names() for index in range(len(cases_of(name)))]


@functools.cache
def drawn(name, index):
    """A case's signature and values that it takes, by argument."""
    spec, case = load_spec(name), cases_of(name)[index]
    made = spec.specialize_case(case)
    signature = Signature.of(Record.of(recipe_of(made, TARGET), {}, b"artifact", "signature", (), "cu13"))
    return spec, case, signature, values_of(signature, case.axes)


def values_of(signature, axes):
    values = {}
    for arg in signature.args:
        if isinstance(arg, Scalar):
            values[arg.name] = 1 if arg.dtype.startswith("int") else 0.5
            continue
        shape = tuple(axes[axis] if isinstance(axis, str) else axis for axis in arg.axes)
        values[arg.name] = Value(shape, f"torch.{arg.dtype}", compact_strides(shape))
    return values


def problem(signature, values, **changed):
    return signature.problem(list({**values, **changed}.values()))


def tensors_of(signature):
    return [arg for arg in signature.args if isinstance(arg, Tensor)]


def grown(value, axis, by=1):
    shape = tuple(size + by * (i == axis) for i, size in enumerate(value.shape))
    return replace(value, shape=shape, strides=compact_strides(shape))


@pytest.mark.parametrize(("name", "index"), CASES)
def test_what_a_case_passes_is_taken(name, index):
    _, _, signature, values = drawn(name, index)

    assert problem(signature, values) is None


@pytest.mark.parametrize(("name", "index"), CASES)
def test_other_dtypes_ranks_addresses_and_kinds_are_refused_by_name(name, index):
    _, _, signature, values = drawn(name, index)
    for arg in tensors_of(signature):
        value = values[arg.name]
        other = next(dtype for dtype in DTYPE_BYTES if dtype != arg.dtype)
        wrong = {
            "dtype": replace(value, dtype=f"torch.{other}"),
            "an axis more": replace(value, shape=(1, *value.shape), strides=(1, *value.strides)),
            "an axis less": replace(value, shape=value.shape[1:], strides=value.strides[1:]),
            "a number": 3,
        }
        if arg.align > 1:
            wrong["address"] = replace(value, address=ADDRESS + arg.align // 2)
        for what, changed in wrong.items():
            found = problem(signature, values, **{arg.name: changed})
            assert found is not None and found.argument == arg.name, (arg.name, what)
            assert found.found and found.needed


@pytest.mark.parametrize(("name", "index"), CASES)
def test_a_size_that_is_not_the_kernel_s_or_not_the_others_is_refused(name, index):
    spec, _, signature, values = drawn(name, index)
    users = {
        axis: [arg.name for arg in tensors_of(signature) if axis in arg.axes]
        for axis in spec.axes
        if spec.axes[axis] is VAR
    }
    for arg in tensors_of(signature):
        for place, axis in enumerate(arg.axes):
            if spec.axes.get(axis) is VAR and len(users[axis]) < 2:
                continue  # its size is its own
            found = problem(signature, values, **{arg.name: grown(values[arg.name], place)})
            assert found is not None, (arg.name, axis)
            assert found.argument in (users.get(axis) or [arg.name])


@pytest.mark.parametrize(("name", "index"), CASES)
def test_rows_that_lie_otherwise_are_refused(name, index):
    _, _, signature, values = drawn(name, index)
    for arg in tensors_of(signature):
        value = values[arg.name]
        for place, size in enumerate(value.shape):
            named = arg.strides is not None and isinstance(arg.strides[place], str)
            if named and arg.stride_divisor == 1:
                continue  # any stride will do
            if size == 1 and not named:
                continue  # never taken
            strides = tuple(stride + (i == place) for i, stride in enumerate(value.strides))
            found = problem(signature, values, **{arg.name: replace(value, strides=strides)})
            assert found is not None and found.argument == arg.name, (arg.name, place)
            assert "strides" in found.found


@pytest.mark.parametrize(("name", "index"), CASES)
def test_numbers_of_another_kind_and_missing_arguments_are_refused(name, index):
    _, _, signature, values = drawn(name, index)
    tensor = values[tensors_of(signature)[0].name]
    for arg in signature.args:
        if isinstance(arg, Scalar):
            assert problem(signature, values, **{arg.name: tensor}).argument == arg.name
            if arg.dtype.startswith("int"):
                assert problem(signature, values, **{arg.name: 0.5}).argument == arg.name
    assert signature.problem(list(values.values())[1:]) is not None


def breaking(constraint, values):
    """A value of the constraint's name that breaks it, or None where none can."""
    bound = constraint.by if not isinstance(constraint, (AtMost, AtLeast)) else constraint.bound
    bound = values[bound] if isinstance(bound, str) else bound
    wanted = {AtMost: bound + 1, AtLeast: bound - 1}.get(type(constraint), values[constraint.name] + 1)
    return wanted if constraint.broken({**values, constraint.name: wanted}) else None


CONSTRAINTS = [(name, number) for name in kernel_names() for number in range(len(load_spec(name).constraints))]


@pytest.mark.parametrize(("name", "number"), CONSTRAINTS)
def test_a_broken_constraint_is_refused_with_its_reason(name, number):
    """Run-time sizes when a launch is bound, compiled ones when the kernel is asked for."""
    spec, case, signature, _ = drawn(name, 0)
    constraint = spec.constraints[number]
    kind = spec.axes.get(constraint.name)
    wrong = breaking(constraint, {**case.axes, **case.statics})
    if kind is VAR:
        assert wrong is not None
        found = signature.problem(list(values_of(signature, {**case.axes, constraint.name: wrong}).values()))
        assert found is not None
        assert constraint.because in found.found
    elif kind is CONST and wrong is not None:
        with pytest.raises(SpecError) as caught:
            spec.specialize(axes={**case.axes, constraint.name: wrong}, dtypes=case.dtypes, statics=case.statics)
        assert any(each.because in str(caught.value) for each in spec.constraints)
    else:  # a static: what is offered is all that can be asked for, and what breaks is refused
        assert constraint.name in spec.statics or wrong is None
        for choice in spec.statics.get(constraint.name, ()):
            chosen = {**case.statics, constraint.name: choice}
            if constraint.broken({**case.axes, **chosen}):
                with pytest.raises(SpecError):
                    spec.specialize(axes=case.axes, dtypes=case.dtypes, statics=chosen)
