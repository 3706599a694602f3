"""Wrong arguments are refused by a kernel's own checks, before anything is launched, and the refusal says why.

No GPU is needed: tensors are only described, and what passes the checks ends at the missing driver.
"""

from dataclasses import replace

import pytest
from described_tensors import CPU, Described, compact

from jitspark.building.build import build, wanted_for
from jitspark.cache.loader import Loader
from jitspark.cache.lookup import Lookup
from jitspark.errors import SpecError
from jitspark.gpus import find_gpus
from jitspark.registry import kernel_names, load_spec
from jitspark.settings import Settings, default_compile_slots
from jitspark.spec import VAR, AtMost, Tensor
from jitspark.toolchain import own_toolchain

pytestmark = pytest.mark.skipif(own_toolchain() is None, reason="needs nvidia-cutlass-dsl and ld")

WIDE = "float64"  # no kernel takes it


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """kernel -> (specialization, all axes, the function) of its middle case."""
    folder = tmp_path_factory.mktemp("cache")
    settings = Settings(cache_dir=folder / "root", lock_dir=folder / "locks", compile_slots=default_compile_slots())
    cases = {name: load_spec(name).cases[len(load_spec(name).cases) // 2] for name in kernel_names()}
    made = {name: load_spec(name).specialize_case(case) for name, case in cases.items()}
    wanted = dict(zip(made, wanted_for(list(made.values()), ["sm_90a"]), strict=True))
    report = build(list(wanted.values()), Lookup(settings), settings)
    assert not report.failed
    kernels = Loader(settings).load([report.entries[wanted[name].key] for name in made])
    functions = {name: kernel.function for name, kernel in zip(made, kernels, strict=True)}
    return {name: (made[name], {**cases[name].axes, **made[name].axes}, functions[name]) for name in made}


def sizes(arg, axes):
    return tuple(axes[axis] if isinstance(axis, str) else axis for axis in arg.axes)


def described(specialization, axes):
    """Right arguments: tensors that are aligned to 1 MiB, and scalars."""
    return [
        Described(sizes(arg, axes), specialization.dtype_of(arg), compact(sizes(arg, axes)))
        if isinstance(arg, Tensor)
        else (1 if "int" in arg.dtype else 1.0)
        for arg in specialization.args
    ]


def wrong_ones(specialization, arg, right):
    """(what is wrong, the argument) for everything that the kernel can know."""
    wider = (*right.shape[:-1], right.shape[-1] + 8)
    yield "dtype", replace(right, dtype=WIDE)
    yield "device_type", replace(right, device=CPU)
    yield "dim", replace(right, shape=(*right.shape, 1), strides=(*right.strides, 1))
    if specialization.spec.axes.get(arg.axes[-1]) is not VAR:
        yield "expected to be", replace(right, shape=wider, strides=compact(wider))
    # strides in front of a run-time size are not in the signature: whoever binds a plan compares them
    known = all(specialization.spec.axes.get(axis) is not VAR for axis in arg.axes[1:])
    if arg.strides is None and len(right.shape) > 1 and right.shape[0] > 1 and known:
        yield "expected to be", replace(right, strides=(right.strides[0] + 16, *right.strides[1:]))
    if arg.align > 1:
        yield "alignment", replace(right, address=right.address + 1)


@pytest.mark.parametrize("name", kernel_names())
def test_every_tensor_that_breaks_the_signature_is_refused_with_a_reason(loaded, name):
    specialization, axes, function = loaded[name]
    values = described(specialization, axes)

    tried = 0
    for index, arg in enumerate(specialization.args):
        if not isinstance(arg, Tensor):
            continue
        for reason, wrong in wrong_ones(specialization, arg, values[index]):
            with pytest.raises((ValueError, TypeError)) as caught:
                function(*values[:index], wrong, *values[index + 1 :])
            said = str(caught.value)
            assert f"argument #{index} " in said, said
            assert reason in said.rpartition("`")[2], said
            tried += 1
    assert tried >= 4


@pytest.mark.parametrize("name", kernel_names())
def test_tensors_that_disagree_about_a_size_are_refused(loaded, name):
    specialization, axes, function = loaded[name]
    values = described(specialization, axes)
    shared = {
        axis: [i for i, arg in enumerate(specialization.args) if isinstance(arg, Tensor) and arg.axes[0] == axis]
        for axis, kind in specialization.spec.axes.items()
        if kind is VAR
    }

    for indices in shared.values():
        for index in indices[1:]:
            shape = (values[index].shape[0] + 8, *values[index].shape[1:])
            with pytest.raises(ValueError, match=r"expected to (match|be)"):
                function(*values[:index], replace(values[index], shape=shape), *values[index + 1 :])


@pytest.mark.parametrize("name", kernel_names())
def test_a_missing_argument_is_refused(loaded, name):
    specialization, axes, function = loaded[name]

    with pytest.raises(TypeError, match="Expects"):
        function(*described(specialization, axes)[:-1])


@pytest.mark.skipif(bool(find_gpus().gpus), reason="what is described must not be launched where it could be")
@pytest.mark.parametrize("name", kernel_names())
def test_right_arguments_come_as_far_as_the_driver(loaded, name):
    specialization, axes, function = loaded[name]

    with pytest.raises(RuntimeError, match=r"(?i)cuda"):
        function(*described(specialization, axes))


def bounds():
    """The bounds of run-time sizes."""
    specs = [load_spec(name) for name in kernel_names()]
    found = [(spec, each) for spec in specs for each in spec.constraints if isinstance(each, AtMost)]
    return [(spec.name, each) for spec, each in found if spec.axes.get(each.name) is VAR]


@pytest.mark.parametrize(("name", "bound"), bounds())
def test_sizes_beyond_a_bound_are_refused_with_the_bounds_reason(name, bound):
    """What a signature cannot say is checked when a plan is bound."""
    spec = load_spec(name)
    case = spec.cases[0]
    specialization = spec.specialize_case(case)
    limit = specialization.statics[bound.bound] if isinstance(bound.bound, str) else bound.bound

    with pytest.raises(SpecError) as caught:
        specialization.check({**case.axes, bound.name: int(limit) + 1})
    assert bound.because in str(caught.value)
