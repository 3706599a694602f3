"""Kernels are found by where they lie, and a folder that breaks the contract is one typed error."""

import subprocess
import sys

import pytest

from jitspark import registry
from jitspark.errors import SpecError
from jitspark.geometry import deployment, geometry_names, load_geometry
from jitspark.registry import kernel_names, load_spec, resolve, specializations

DEPLOYMENTS = [(name, tp) for name in geometry_names() for tp in load_geometry(name).tp_sizes]
SPEC = """
from jitspark.spec import CONST, KernelSpec
FLAGS = {{"flag": (1, 1.0, True)}}
SPEC = KernelSpec("{name}", {{"n": CONST}}, {{}}, FLAGS, (), (), (), "kernel:f", "reference:f")
def specializations(deployment):
    for flag in (1, 1.0, True, 1):
        yield SPEC.specialize(axes={{"n": 8}}, statics={{"flag": flag}})
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Write a spec.py into a kernel folder of this name, among the real kernels."""
    monkeypatch.setattr(registry.kernel_specs, "__path__", [str(tmp_path), *registry.kernel_specs.__path__])
    monkeypatch.setattr(registry, "KERNELS_DIR", tmp_path)

    def write(name, text):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.py").write_text(text, encoding="utf-8")
        return name

    yield write
    for name in [name for name in sys.modules if name.startswith("kernel_specs.made_up")]:
        del sys.modules[name]


def test_every_kernel_is_named_as_its_folder():
    assert kernel_names()
    assert [load_spec(name).name for name in kernel_names()] == list(kernel_names())


@pytest.mark.parametrize("name", kernel_names())
def test_kernel_and_reference_resolve_to_files_of_the_folder(name):
    spec = load_spec(name)

    for location in (spec.kernel, spec.reference):
        module, function = resolve(name, location)
        assert module == f"kernel_specs.{name}.{location.partition(':')[0]}"
        assert function.isidentifier()


@pytest.mark.parametrize(("geometry", "tp"), DEPLOYMENTS)
@pytest.mark.parametrize("name", kernel_names())
def test_specializations_are_yielded_once_each(name, geometry, tp):
    made = list(registry._declared(name, "specializations")(deployment(geometry, tp)))

    # a deployment may have no use for a kernel, as a rank alone has none for exchanges; the real one at TP 8 has
    assert made or specializations(deployment("muse_spark_open", 8), [name])
    assert len({each.title() for each in made}) == len(made)
    assert tuple(made) == specializations(deployment(geometry, tp), [name])


def test_specializations_are_the_same_in_every_process():
    code = (
        "from jitspark import geometry, registry\n"
        "for each in registry.specializations(geometry.deployment('muse_spark_open', 8)): print(each.title())"
    )
    command = [sys.executable, "-c", code]
    runs = [subprocess.check_output(command, env={"PYTHONHASHSEED": seed}) for seed in ("1", "2")]

    assert runs[0] == runs[1]
    assert len(runs[0].splitlines()) == len(specializations(deployment("muse_spark_open", 8)))


def test_duplicates_are_dropped_but_types_are_told_apart(folder):
    folder("made_up_flags", SPEC.format(name="made_up_flags"))

    made = specializations(deployment("tiny", 1))

    assert [repr(each.statics["flag"]) for each in made] == ["1", "1.0", "True"]


@pytest.mark.parametrize("name", ["nix", "", "primitives", "geometry", "../jitspark", "rmsnorm/../rmsnorm"])
def test_an_unknown_kernel_lists_the_known_ones(name):
    with pytest.raises(SpecError) as caught:
        load_spec(name)

    assert caught.value.found == f"unknown {name!r}"
    assert all(known in caught.value.needed for known in kernel_names())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "AttributeError: module 'kernel_specs.made_up_broken.spec' has no attribute 'SPEC'"),
        ("SPEC = 7", "SPEC = 7"),
        (SPEC.format(name="another"), "SPEC = 'another'"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("def", "SyntaxError"),
        ("SPEC = KernelSpec()", "NameError: name 'KernelSpec' is not defined"),
        ("from jitspark.spec import KernelSpec; KernelSpec()", "TypeError"),
        ("{}['threads']", "KeyError: 'threads'"),
    ],
    ids=["empty", "no spec", "wrong name", "import", "syntax", "name", "type", "key"],
)
def test_a_broken_spec_module_names_its_folder(folder, text, found):
    name = folder("made_up_broken", text)

    with pytest.raises(SpecError) as caught:
        load_spec(name)

    assert caught.value.where == name
    assert caught.value.found.startswith(found)
    assert "kernel_specs/made_up_broken/spec.py" in caught.value.remedy


def test_a_spec_module_without_specializations(folder):
    folder("made_up_spec_only", SPEC.format(name="made_up_spec_only").partition("def ")[0])

    with pytest.raises(SpecError) as caught:
        specializations(deployment("tiny", 1))

    assert caught.value.where == "made_up_spec_only"
    assert "no attribute 'specializations'" in caught.value.found


@pytest.mark.parametrize("location", ["spec", "spec:", ":f", "nix:f", "spec:not a name", "../spec:f", "spec:f:g"])
def test_a_location_that_cannot_be_resolved(location):
    with pytest.raises(SpecError) as caught:
        resolve(kernel_names()[0], location)

    assert caught.value.found == repr(location)
