"""Every kernel of the TP 8 deployment, compiled for Blackwell and disassembled: the right target, no spills, and the
instructions that were meant. What a kernel's machine code must hold is declared in its spec."""

import pytest

from jitspark.building.build import build, wanted_for
from jitspark.cache.lookup import Lookup
from jitspark.geometry import deployment
from jitspark.machine_code import device_image, disassemble, disassembler
from jitspark.registry import kernel_names, load_spec, specializations
from jitspark.settings import Settings, default_compile_slots
from jitspark.toolchain import own_toolchain

pytestmark = [
    pytest.mark.skipif(own_toolchain() is None, reason="needs nvidia-cutlass-dsl and ld"),
    pytest.mark.skipif(disassembler() is None, reason="needs nvidia-cuda-nvdisasm"),
]

TARGETS = ("sm_90a", "sm_100a", "sm_103a")


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """(kernel, target) -> the artifacts of up to three specializations, compiled here."""
    folder = tmp_path_factory.mktemp("cache")
    settings = Settings(cache_dir=folder / "root", lock_dir=folder / "locks", compile_slots=default_compile_slots())
    chosen = [s for name in kernel_names() for s in _spread(specializations(deployment("muse_spark_open", 8), [name]))]

    report = build(wanted_for(chosen, TARGETS), Lookup(settings), settings)

    assert not report.failed
    found: dict[tuple[str, str], list[bytes]] = {}
    for key, entry in report.entries.items():
        found.setdefault((key.kernel, key.target), []).append(entry.read_artifact())
    return found


def _spread(all_of_them):
    """The first, the middle and the last: different sizes and statics, in a time that a test can take."""
    return {index: all_of_them[index] for index in (0, len(all_of_them) // 2, len(all_of_them) - 1)}.values()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", kernel_names())
def test_machine_code_is_what_the_spec_declares(artifacts, kernel, target):
    declared = load_spec(kernel).instructions

    codes = [disassemble(artifact) for artifact in artifacts[kernel, target]]

    assert declared, f"{kernel}'s spec declares no instructions to look for"
    for code in codes:
        assert code.target == target
        assert (code.stack, code.local) == (0, 0), f"{kernel} spills: {code}"
        assert [name for name in declared if not code.holds(name)] == []


def test_device_image_holds_no_host_code(artifacts):
    artifact = artifacts["rmsnorm", "sm_100a"][0]

    image = device_image(artifact)

    assert image.startswith(b"\x7fELF")
    assert b"x86-64" not in image
    assert len(image) < len(artifact)
