"""Public threads about keys: too wide, too narrow or unstable. Each is replayed; docs/scenarios.md has the table."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from stub_cache import fill, lookup_in, other_toolchain, settings_for, wanted

from cache_tools.difference import differences
from jitspark.building.build import build
from jitspark.cache.loader import Loader
from jitspark.cache.store import Layer, toolchains_of
from jitspark.errors import MissingEntriesError, SpecError, TargetError
from jitspark.key import canonical, plain, toolchain_digest

ROOT = Path(__file__).resolve().parents[2]
ITEM = wanted(1)[0]
KEYS = """
import sys
from jitspark.key import recipe_of, toolchain_digest
from jitspark.registry import load_spec
from jitspark.toolchain import own_toolchain
spec = load_spec("rmsnorm")
print(recipe_of(spec.specialize_case(spec.cases[0]), "sm_90a").digest, toolchain_digest(own_toolchain()))
"""


def keys_in_environment(path=None, **environment):
    """Recipe and toolchain digests as a fresh process computes them."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(path or ROOT), **environment}
    done = subprocess.run([sys.executable, "-c", KEYS], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.split()


WHEEL = {
    "METADATA": "Metadata-Version: 2.1\nName: nvidia-cutlass-dsl\nVersion: 4.8.0\n",
    "RECORD": "cutlass/a.py,sha256=abc,10\n../../bin/{prefix}/tool,sha256={prefix},1\n"
    "nvidia_cutlass_dsl-4.8.0.dist-info/INSTALLER,sha256={prefix},4\ncutlass/__pycache__/a.pyc,,\n",
}
FINGERPRINT = "from jitspark.toolchain import _fingerprint; print(_fingerprint('nvidia-cutlass-dsl'))"


def fingerprint_below(prefix):
    folder = prefix / "site-packages" / "nvidia_cutlass_dsl-4.8.0.dist-info"
    folder.mkdir(parents=True)
    for name, text in WHEEL.items():
        (folder / name).write_text(text.replace("{prefix}", prefix.name))
    path = os.pathsep.join([str(folder.parent), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", FINGERPRINT], capture_output=True, text=True, check=True, env={"PYTHONPATH": path}
    )
    return done.stdout


def test_the_same_wheels_under_another_prefix_are_the_same_toolchain(tmp_path):
    """vllm#48190: the path of site-packages in the key; 93.7 s of 170.6 s were wasted."""
    first, second = fingerprint_below(tmp_path / "first"), fingerprint_below(tmp_path / "second")

    assert "4.8.0" in first
    assert first == second


def test_unrelated_variables_change_no_key():
    """dynamo#10695: an environment variable of the pod was in the key, so nothing ever hit."""
    noise = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7", "HOSTNAME": "pod-7", "USER": "someone", "TMPDIR": "/tmp"}
    noise |= {"HOME": "/nowhere", "XDG_CACHE_HOME": "/elsewhere", "LANG": "C", "PYTHONHASHSEED": "7", "CUTE_DSL_X": "1"}

    assert keys_in_environment() == keys_in_environment(**noise)


def test_explain_names_the_factor_that_differs():
    """dynamo#10695: nobody could see which factor made the miss."""
    stored, asked = plain(ITEM.recipe), plain(wanted(1, start=3)[0].recipe)

    assert [str(each) for each in differences(stored, asked)] == ["axes.n: stored 0, wanted 3"]


def test_a_linked_toolkit_is_the_same_toolkit(tmp_path):
    """flashinfer#4884: a path that depends on PATH in the key; a rebuild of 30 minutes."""
    linker = subprocess.run(["which", "ld"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "ld").symlink_to(linker)
    (tmp_path / "checkout").symlink_to(ROOT)

    plain_keys = keys_in_environment()

    assert keys_in_environment(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}") == plain_keys
    assert keys_in_environment(path=tmp_path / "checkout") == plain_keys


@pytest.mark.parametrize("value", [{1, 2}, b"x", object(), 1 + 2j, Path("/x"), range(3), Exception], ids=repr)
def test_a_value_that_is_no_plain_value_is_refused_with_its_field(value):
    """flash-attention#2635: a 0-d tensor in the key recompiled at every step."""
    with pytest.raises(SpecError) as refused:
        canonical({"statics": {"scale": [1, value]}})

    assert refused.value.where == "key field statics.scale[1]"


def test_a_zero_dimensional_array_is_refused_with_its_field():
    """flash-attention#2635 with the very kind of value."""
    numpy = pytest.importorskip("numpy")

    with pytest.raises(SpecError, match=r"statics\.scale"):
        canonical({"statics": {"scale": numpy.float32(1.0)}})
    with pytest.raises(SpecError, match=r"statics\.scale"):
        canonical({"statics": {"scale": numpy.array(1.0)}})


def test_equal_numbers_of_other_types_are_other_keys():
    """flash-attention#2635, the other way round: 1, 1.0 and True compile to different kernels."""
    assert len({canonical({"a": value}) for value in (1, 1.0, True, "1")}) == 4


def test_two_compilers_share_a_root_without_poisoning_each_other(tmp_path, templates):
    """FlagGems#5829: a key without the compiler's identity."""
    toolchains = [other_toolchain(name) for name in ("a", "b")]
    layers = [fill(tmp_path / "cache", [ITEM], templates, toolchain)[0].layer for toolchain in toolchains]

    found = [lookup_in(layers[0], toolchain=toolchain).find(ITEM.key) for toolchain in toolchains]

    assert [entry.toolchain for entry in found] == [toolchain_digest(toolchain) for toolchain in toolchains]
    assert len(toolchains_of(layers[0], ITEM.key)) == 2


def test_a_cache_for_another_architecture_is_named_never_launched(tmp_path, templates):
    """flashinfer#5355, flashinfer#4363: wrong or missing architectures in what was prebuilt."""
    entry = fill(tmp_path / "image", wanted(1, target="sm_100a"), templates)[0]
    image = Layer(entry.layer.root, writable=False)
    settings = settings_for(None, tmp_path, compile="never")

    with pytest.raises(MissingEntriesError, match=r"for sm_100a-.* only, not for sm_90a-"):
        build(wanted(1, target="sm_90a"), lookup_in(image), settings)
    with pytest.raises(TargetError, match=r"an entry for sm_100a; needed one for sm_90a"):
        Loader(settings).load([entry], target="sm_90a")
