"""Every kernel's signature takes what its cases pass, and refuses each argument that is off in one way, with a reason.

Generic over all specs: nothing is launched, and values are stand-ins that have what a tensor is asked for.
"""

import functools
from dataclasses import dataclass, replace

import pytest

from jitspark.cache.record import Record
from jitspark.constraints import names_in
from jitspark.errors import SpecError
from jitspark.key import recipe_of
from jitspark.plans.launch_signature import Signature, compact_strides
from jitspark.registry import kernel_names, load_spec
from jitspark.spec import CONST, DTYPE_BYTES, VAR, Scalar, Tensor

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
    signature = signature_of(spec.specialize_case(case))
    return spec, case, signature, values_of(signature, case.axes)


def signature_of(made):
    return Signature.of(Record.of(recipe_of(made, TARGET), {}, b"artifact", "signature", (), "cu13"))


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


def breaking(constraint, case, offered):
    """(name, value) of the offered ones that break this constraint in a case that differs in nothing else."""
    values = {**case.axes, **case.statics}
    return [(name, value) for name in dict.fromkeys(names_in(constraint)) for value in offered(name)
            if constraint.broken({**values, name: value})]  # fmt: skip


CONSTRAINTS = [(name, number) for name in kernel_names() for number in range(len(load_spec(name).constraints))]


@pytest.mark.parametrize(("name", "number"), CONSTRAINTS)
def test_a_broken_constraint_is_refused_with_its_reason(name, number):
    """Run-time sizes when a launch is bound, compiled ones and statics when the kernel is asked for."""
    spec = load_spec(name)
    constraint, reasons = spec.constraints[number], [each.because for each in spec.constraints]

    def sizes(kind, smallest):
        def around(axis):
            if spec.axes.get(axis) is not kind:
                return []
            size = case.axes[axis]
            return [wanted for wanted in (size + 1, size - 1, 2 * size, size << 20, 0) if wanted >= smallest]

        return around

    tried = 0
    for case in spec.cases:
        run_time = breaking(constraint, case, sizes(VAR, 0))
        compiled = breaking(constraint, case, sizes(CONST, 1))
        statics = breaking(constraint, case, lambda static: spec.statics.get(static, ()))
        tried += len(run_time + compiled + statics)
        for axis, size in run_time:
            signature = signature_of(spec.specialize_case(case))
            found = signature.problem(list(values_of(signature, {**case.axes, axis: size}).values()))
            assert found is not None and any(because in found.found for because in reasons)
        for asked in (*({"axes": dict([pair])} for pair in compiled), *({"statics": dict([pair])} for pair in statics)):
            with pytest.raises(SpecError) as caught:
                spec.specialize(
                    axes={**case.axes, **asked.get("axes", {})},
                    dtypes=case.dtypes,
                    statics={**case.statics, **asked.get("statics", {})},
                )
            assert any(because in str(caught.value) for because in reasons)
        if tried:
            return
    pytest.fail("nothing that can be asked for breaks it")
