"""Why a kernel can never be another kernel's code: what an artifact exports, where it is mapped, what is checked."""

import os
import subprocess

import pytest
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from stub_cache import fill, number_of, settings_for, wanted

from jitspark.cache import loader as loader_module
from jitspark.cache.loader import Loader
from jitspark.compiler import link
from jitspark.errors import EntryError

ITEMS = wanted(3)
needs_ld = pytest.mark.skipif(link.linker_path() is None, reason="needs ld")


def test_kernels_loaded_one_by_one_are_their_own_though_descriptors_are_reused(tmp_path, templates):
    entries = fill(tmp_path / "cache", ITEMS, templates)
    loader = Loader(settings_for(tmp_path / "cache", tmp_path))

    kernels = [loader.load([entry])[0] for entry in entries]

    assert [kernel.function() for kernel in kernels] == [number_of(item) for item in ITEMS]


def test_a_path_that_does_not_tell_contents_apart_is_noticed_before_a_wrong_kernel_runs(
    tmp_path, templates, monkeypatch
):
    """The dynamic loader compares the texts of paths, so a reused descriptor's name gives the library loaded before."""
    monkeypatch.setattr(loader_module, "spelling", lambda _, descriptor: f"/proc/self//fd/{descriptor}")
    first, second, _ = fill(tmp_path / "cache", wanted(3, start=10), templates)
    loader = Loader(settings_for(tmp_path / "cache", tmp_path))
    loader.load([first])

    with pytest.raises(EntryError, match="outside its own mapping"):
        loader.load([second])


def test_a_memory_file_never_changes_again():
    descriptor = loader_module.sealed_memory_file("test", b"content")
    try:
        for attempt in (
            lambda: os.write(descriptor, b"x"),
            lambda: os.ftruncate(descriptor, 0),
            lambda: os.ftruncate(descriptor, 1 << 20),
        ):
            with pytest.raises(PermissionError):
                attempt()
        assert os.pread(descriptor, 100, 0) == b"content"
    finally:
        os.close(descriptor)


@pytest.fixture
def linked(tmp_path):
    """An object with two global symbols, linked as an artifact."""

    def run(*command):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "code").write_bytes(b"\x90" * 64)
    run("ld", "-r", "-b", "binary", "-o", "code.o", "code")
    names = ("--redefine-sym", "_binary_code_start=__tvm_ffi_stub", "--redefine-sym", "_binary_code_end=cuda_load")
    run("objcopy", "--rename-section", ".data=.text,alloc,load,readonly,code,contents", *names, "code.o", "kernel.o")
    link.link("stub", tmp_path / "kernel.o", tmp_path / "kernel.so")
    return ELFFile((tmp_path / "kernel.so").open("rb"))


@needs_ld
def test_an_artifact_exports_its_kernel_and_nothing_else(linked):
    symbols = linked.get_section_by_name(".dynsym").iter_symbols()

    assert [s.name for s in symbols if s.name and s["st_shndx"] != "SHN_UNDEF"] == ["__tvm_ffi_stub"]


@needs_ld
def test_an_artifact_binds_its_references_inside_and_at_once(linked):
    dynamic = next(s for s in linked.iter_sections() if isinstance(s, DynamicSection))
    flags = next((tag["d_val"] for tag in dynamic.iter_tags("DT_FLAGS")), 0)
    symbolic, now = 0x2, 0x8

    assert flags & symbolic or list(dynamic.iter_tags("DT_SYMBOLIC"))
    assert flags & now
    assert linked.get_section_by_name(".note.gnu.build-id") is None
    assert [s["p_flags"] for s in linked.iter_segments() if s["p_type"] == "PT_GNU_STACK"] == [6]  # not executable
