"""Whatever can change an artifact's bytes changes its key, and nothing else does: each input is perturbed in turn.

The loops run over the fields of the dataclasses, so that a field that is added is covered on arrival.
"""

import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
from stub_cache import other_toolchain

from jitspark import key as key_module
from jitspark.constraints import AtLeast, AtMost, Divisible, Equals, OneOf
from jitspark.key import digest_of, plain, recipe_of, toolchain_digest
from jitspark.registry import kernel_names
from jitspark.source_digest import ROOT, kernel_sources
from jitspark.spec import CONST, VAR, Case, KernelSpec, Scalar, Specialization, Tensor

KERNEL = "rmsnorm"
SPEC = KernelSpec(
    name=KERNEL,
    axes={"num_tokens": VAR, "hidden_size": CONST},
    dtypes={"activation": ("bfloat16", "float16"), "residual": ("float32",)},
    statics={"threads": (128, 256), "fused": (True, False)},
    args=(
        Tensor("x", ("num_tokens", "hidden_size"), "activation", strides=("row", 1)),
        Tensor("out", ("num_tokens", "hidden_size"), "residual", role="out", when=("fused", True)),
        Scalar("eps", "float32"),
    ),
    constraints=(
        Divisible("hidden_size", 8, because="vectors"),
        AtMost("hidden_size", 16384, because="registers"),
        AtLeast("hidden_size", 8, because="one vector"),
        Equals("hidden_size", "32 * threads", because="a thread has four vectors"),
        OneOf("threads", (128, 256), because="whole warps", when=("fused", True)),
    ),
    targets=("sm_90a", "sm_100a"),
    kernel="kernel:rmsnorm",
    reference="reference:rmsnorm",
)
MADE = Specialization(
    SPEC, {"hidden_size": 4096}, {"activation": "bfloat16", "residual": "float32"}, {"threads": 128, "fused": True}
)


def digest(specialization=MADE, target="sm_90a"):
    return recipe_of(specialization, target).digest


def a_different(value):
    """Another value of the same kind."""
    changes = {
        bool: lambda: not value,
        int: lambda: value + 1,
        str: lambda: f"{value}x",
        float: lambda: value + 1.0,
        tuple: lambda: (*value, "more"),
        dict: lambda: {**value, "more": "x"},
        type(None): lambda: "something",
    }
    return changes[type(value) if type(value) in changes else dict]()


RECIPE = recipe_of(MADE, "sm_90a")
ARGUMENTS = [(index, field.name) for index, arg in enumerate(SPEC.args) for field in dataclasses.fields(arg)]
CONSTRAINTS = [(index, field.name) for index, c in enumerate(SPEC.constraints) for field in dataclasses.fields(c)]
# What a spec says to people, to tests and to whoever makes a plan, not to the compiler.
FOR_PLANS = {"early_reads", "triggers_early", "early_writes", "partial_outputs"}
NOT_IN_BYTES = {"targets", "reference", "cases", "instructions"} | FOR_PLANS


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(RECIPE)])
def test_every_field_of_a_recipe_changes_the_digest(field):
    changed = dataclasses.replace(RECIPE, **{field: a_different(getattr(RECIPE, field))})

    assert changed.digest != RECIPE.digest, f"kernels that differ only in {field} would share an artifact"


def with_changed_item(items, index, field):
    """The items, one of which has another value in this field. Built around the checks of a spec."""
    changed = dataclasses.replace(items[index], **{field: a_different(getattr(items[index], field))})
    return (*items[:index], changed, *items[index + 1 :])


def with_spec(**changes):
    """The specialization with these fields of its spec, whether or not they make sense together."""
    spec = object.__new__(KernelSpec)
    for field in dataclasses.fields(KernelSpec):
        object.__setattr__(spec, field.name, changes.get(field.name, getattr(SPEC, field.name)))
    return dataclasses.replace(MADE, spec=spec)


@pytest.mark.parametrize(("index", "field"), ARGUMENTS)
def test_every_field_of_an_argument_changes_the_digest(index, field):
    changed = with_changed_item(SPEC.args, index, field)
    if field == "when":
        changed = (*SPEC.args[:index], *SPEC.args[index + 1 :])

    assert digest(with_spec(args=changed)) != digest(), f"{field} of an argument is not in the key"


@pytest.mark.parametrize(("index", "field"), CONSTRAINTS)
def test_every_field_of_a_constraint_but_its_reason_changes_the_digest(index, field):
    changed = with_spec(constraints=with_changed_item(SPEC.constraints, index, field))

    assert (digest(changed) == digest()) is (field == "because")


def test_the_order_of_arguments_changes_the_digest():
    assert digest(with_spec(args=SPEC.args[::-1])) != digest()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(KernelSpec)])
def test_every_field_of_a_spec_that_reaches_the_compiler_changes_the_digest(field):
    changes = {
        "name": "gated_residual_rmsnorm",
        "axes": {**SPEC.axes, "num_tokens": CONST},
        "dtypes": {**SPEC.dtypes, "activation": ("bfloat16",)},  # no choice: the factory is not told
        "statics": SPEC.statics,  # choices that are not taken have no part; see the next test for those that are
        "args": SPEC.args[:-1],
        "constraints": SPEC.constraints[:-1],
        "targets": ("sm_90a",),
        "kernel": "kernel:other_function",
        "reference": "reference:other",
        "cases": (Case({}, {}, {}, 0.0, 0.0),),
        "early_reads": ("x",),
        "early_writes": ("out",),
        "partial_outputs": ("out",),
    }
    changed = with_spec(**{field: changes.get(field, a_different(getattr(SPEC, field)))})

    assert (digest(changed) == digest()) is (field in NOT_IN_BYTES | {"statics"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("axes", {"hidden_size": 2048}),
        ("dtypes", {"activation": "float16", "residual": "float32"}),
        ("statics", {"threads": 256, "fused": True}),
        ("statics", {"threads": 128, "fused": False}),
        ("statics", {"threads": 128.0, "fused": True}),
        ("statics", {"threads": 128, "fused": 1}),
    ],
)
def test_every_choice_of_a_specialization_changes_the_digest(field, value):
    assert digest(dataclasses.replace(MADE, **{field: value})) != digest()


def test_the_target_changes_the_digest():
    assert digest(target="sm_100a") != digest(target="sm_90a")


def test_the_codegen_options_and_our_procedure_change_the_digest(monkeypatch):
    before = digest()
    monkeypatch.setattr(key_module, "codegen_options", lambda target: ("--enable-tvm-ffi", f"--gpu-arch {target} -O2"))
    with_options = digest()
    monkeypatch.setattr(key_module, "PROCEDURE", key_module.PROCEDURE + 1)

    assert len({before, with_options, digest()}) == 3


def leaves(value, at=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [leaf for name, item in items for leaf in leaves(item, (*at, name))]
    return found or [at]


def replaced(value, at):
    if not at:
        return a_different(value)
    copy = value.copy()
    copy[at[0]] = replaced(value[at[0]], at[1:])
    return copy


@pytest.mark.parametrize("at", leaves(plain(other_toolchain())), ids=lambda at: ".".join(map(str, at)))
def test_every_part_of_a_toolchain_changes_its_digest(at):
    changed = digest_of(replaced(plain(other_toolchain()), at))

    assert changed != toolchain_digest(other_toolchain())


@pytest.fixture
def tree(tmp_path):
    """A copy of the kernels' sources, to edit."""
    kernel_sources.__globals__["_read"].cache_clear()
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "kernel_specs", tmp_path / "kernel_specs", ignore=ignored)
    return tmp_path


def all_sources(root):
    return {kernel: kernel_sources(kernel, root=root) for kernel in kernel_names()}


def affected_by(tree, name):
    """The kernels whose sources change with one more line in this file."""
    before = all_sources(tree)
    with (tree / name).open("a") as stream:
        stream.write("\n# one more line\n")
    kernel_sources.__globals__["_read"].cache_clear()
    after = all_sources(tree)
    return {kernel for kernel in before if before[kernel] != after[kernel]}


def test_two_checkouts_have_the_same_sources(tree):
    assert all_sources(tree) == all_sources(ROOT)


@pytest.mark.parametrize("kernel", kernel_names())
def test_a_line_in_a_kernel_affects_that_kernel_alone(tree, kernel):
    assert affected_by(tree, f"kernel_specs/{kernel}/kernel.py") == {kernel}


@pytest.mark.parametrize("kernel", kernel_names())
@pytest.mark.parametrize("module", ["spec.py", "reference.py"])
def test_a_line_in_a_spec_or_a_reference_is_no_change_of_sources(tree, kernel, module):
    """The spec's content is in the key by value, so that a comment in it changes nothing."""
    importers = {k for k in kernel_names() if f"kernel_specs/{kernel}/{module}" in dict(kernel_sources(k))}

    assert affected_by(tree, f"kernel_specs/{kernel}/{module}") == importers


def primitives():
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "kernel_specs/primitives").glob("*.py"))


@pytest.mark.parametrize("name", primitives())
def test_a_line_in_a_primitive_affects_exactly_the_kernels_that_reach_it(tree, name):
    reaching = {kernel for kernel, sources in all_sources(tree).items() if name in dict(sources)}

    assert affected_by(tree, name) == reaching


def test_a_transitive_import_is_reached(tmp_path):
    files = {
        "kernel_specs/__init__.py": "",
        "kernel_specs/a/kernel.py": "def f():\n    from kernel_specs.b import c\n",
        "kernel_specs/b/c.py": "import kernel_specs.d.e\n",
        "kernel_specs/d/e.py": "from .f import g\n",
        "kernel_specs/d/f.py": "g = 1\n",
        "kernel_specs/d/unrelated.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert {name for name, _ in kernel_sources("a", root=tmp_path)} == set(files) - {"kernel_specs/d/unrelated.py"}


COMPILE = """
import sys
from pathlib import Path
from jitspark.building.build import build
from jitspark.key import recipe_of
from jitspark.cache.lookup import Lookup
from jitspark.building.progress import Wanted
from jitspark.registry import load_spec
from jitspark.settings import Settings
folder = Path(sys.argv[1])
spec = load_spec("rmsnorm")
specialization = spec.specialize_case(spec.cases[0])
settings = Settings(cache_dir=folder / "cache", lock_dir=folder / "locks")
report = build([Wanted(specialization, recipe_of(specialization, "sm_90a"))], Lookup(settings), settings)
print(*((entry.key.recipe, entry.record.sha256) for entry in report.entries.values()), list(report.failed.values()))
"""
DSL_NOISE = {
    "CUTE_DSL_LINEINFO": "1",
    "CUTE_DSL_KEEP_PTX": "1",
    "CUTE_DSL_NO_CACHE": "1",
    "CUTE_DSL_ARCH": "sm_100a",
    "CUTE_DSL_PRINT_IR": "1",
    "CUTE_DSL_ENABLE_ASSERTIONS": "1",
    "PYTHONHASHSEED": "7",
    "PYTHONOPTIMIZE": "1",
}


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="the CuTe DSL is not installed")
def test_the_dsls_own_variables_have_no_effect_on_the_bytes(tmp_path):
    def compiled(name, **noise):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT), **noise}
        command = [sys.executable, "-c", COMPILE, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout

    plainly = compiled("plain")
    assert plainly.startswith("('")
    assert plainly == compiled("noisy", **DSL_NOISE)


def test_the_recipe_of_a_real_entry_is_json_all_the_way():
    assert json.loads(json.dumps(plain(RECIPE))) == plain(RECIPE)
